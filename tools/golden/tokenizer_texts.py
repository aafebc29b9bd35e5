"""Texts that try a byte-level BPE tokenizer: each group names what it tries."""

NUMBERS = [
    "0", "7", "42", "007", "123", "1234", "12345678901234567890", "1,234,567.89", "3.14159", "-5", "+5", "1e-5", "6.02e23",
    "0x1F", "0b1010", "2024-02-29", "12:34:56", "1/2", "50%", "$9.99", "€10", "£1m", "1st 2nd 3rd", "v1.2.3-rc4", "192.168.0.1",
    "a1b2c3", "x2", "2x", "abc123def456", " 1", "  1", "1 ", "1  2", "1\n2", "10 000", "1_000_000", "½", "½ ٣٤٥", "¼¾⅓", "x² + y³", "H₂O",
    "٠١٢٣٤٥٦٧٨٩", "السنة ٢٠٢٤", "۱۲۳", "१२३", "１２３", "Ⅷ and ⅳ", "①②③", "㊿", "𝟘𝟙𝟚", "5km", "5 km", "no.7", "#1", "12'34", "9's", "1'll",
]  # fmt: skip

WHITESPACE = [
    "", " ", "  ", "   ", "    ", " " * 5, " " * 7, " " * 8, " " * 15, " " * 16, " " * 17, " " * 33, " " * 100, "\t", "\t\t", "\t\t\t\t", " \t ", "\n", "\n\n",
    "\n\n\n", "\n" * 10, "\r\n", "\r\n\r\n", "\r", " \n", "\n ", " \n \n ", "a b", "a  b", "a   b", "a    b", " a", "  a", "a ", "a  ", "\ta",
    "a\t", "a\nb", "a\n\nb", "a \n b", "a\r\nb", "\u00a0", "a\u00a0b", "\u2003em\u2003space", "\u3000全角", "zero\u200bwidth", "\ufeffbom", "\u2028line\u2029",
    "\x0b\x0c", "\u0085next", "trailing \t \n", "    indented", "        return x",
]  # fmt: skip

ENGLISH = [
    "a", "A", "Hello", "hello", " Hello", "HELLO", "Hello world", "Hello, world!", "The capital of France is", "don't", "Don't", "DON'T", "I'm you're we've they'll he'd it's",
    "'s 't 're 've 'm 'll 'd", "'S 'T 'RE", "can’t “quote” ‘single’", "rock'n'roll", "O'Neill's", "e.g., i.e., etc.", "Mr. Smith went to Washington, D.C.", "well-known",
    "state-of-the-art", "hyphen-", "-hyphen", "em—dash", "en–dash", "...", "…", "!!!", "?!?!", "(parenthesis)", "[bracket] {brace} <angle>", "semi;colon:colon",
    "snake_case", "camelCase", "PascalCase", "SCREAMING_SNAKE", "kebab-case", "__dunder__", "user@example.com", "https://example.com/path?q=1&r=two#frag", "C:\\Windows\\System32",
    "/usr/local/bin", "~/.config", "@handle #hashtag", "a&b", "50/50", "* bullet", "- [ ] todo", "# Heading", "**bold** _it_ `code`", "|a|b|", "$x^2$", "\\frac{1}{2}", "&amp;&lt;",
    "antidisestablishmentarianism", "pneumonoultramicroscopicsilicovolcanoconiosis", "Donaudampfschifffahrtsgesellschaftskapitän", "a" * 50, "ab" * 60, "xyzzy" * 20, "Z" * 129,
    "supercalifragilisticexpialidocious " * 3, "The quick brown fox jumps over the lazy dog.", "What is gravity? Answer in one sentence.", "the the the the the",
]  # fmt: skip

CODE = [
    "def fibonacci(n):\n", "def f(x):\n    return x + 1\n", "for i in range(10):\n\tprint(i)\n", "if (a && b || !c) { return; }", "x += 1; y -= 2; z *= 3;",
    "fn main() {\n    println!(\"{:?}\", vec![1, 2, 3]);\n}\n", "#include <stdio.h>\nint main(void) { return 0; }\n", "SELECT * FROM t WHERE id = 42 AND name LIKE '%x%';",
    "{\"key\": [1, 2.5, null, true], \"nested\": {\"a\": \"b\"}}", "<div class=\"a b\">text</div>", "let x: Vec<Option<&'a str>> = Vec::new();", "a->b::c.d[e](f)", "x = y == z != w >= v <= u",
    "lambda x: x**2 // 3 % 4", "/* comment */ // line\n# hash\n-- sql", "\"escaped \\\"quote\\\" \\n \\t \\\\\"", "regex: ^[a-z]+\\d{2,}$", "import numpy as np\nnp.zeros((3, 4))[:, 0]",
    "\n\n\nclass A(B):\n\n    def __init__(self):\n        pass\n", "git commit -m 'fix: a bug (#123)'", "01 02 03\n04 05 06\n", "=====\n-----\n~~~~~\n", "\u2502   \u251c\u2500\u2500 src",
    "0xDEADBEEF 0o777 1_000u64 1.5f32", "a\t=\t1\n\tb\t=\t2",
]  # fmt: skip

LANGUAGES = [
    "é", "café", "cafe\u0301", "naïve façade", "Größe", "straße", "ÅÄÖ åäö", "ñandú", "çığ", "Zażółć gęślą jaźń", "Привет, мир!", "Γειά σου Κόσμε", "שלום עולם", "مرحبا بالعالم",
    "नमस्ते दुनिया", "สวัสดีชาวโลก", "你好，世界！", "我在北京吃了三碗面。", "こんにちは世界", "カタカナ", "한국어 텍스트", "繁體中文字", "漢字とかな交じり文123", "日本 語", "Xin chào thế giới",
    "ქართული", "አማርኛ", "தமிழ்", "বাংলা", "ﬁ ligature", "𝓜𝓪𝓽𝓱", "Ａ１", "İstanbul ıI", "ǅ ǆ", "a\u0300\u0301\u0302", "∀x∈ℝ: x²≥0", "∑∏∫√∞≠≤≥", "← ↑ → ↓", "™ © ®", "°C °F", "ʃʒθð", "¿Qué? ¡Sí!",
]  # fmt: skip

EMOJI = [
    "😀", "😀😀", "a😀b", " 😀", "👍🏽", "👨‍👩‍👧‍👦", "🇫🇷🇩🇪", "❤️", "☃", "1️⃣", "🏳️‍🌈", "💩" * 10, "I ❤️ NY", "\U0001f9ff\U0010ffff", "\ufffd", "\x00", "\x01\x02\x1f", "\x7f\x80\x9f", "\ue000",
]  # fmt: skip

SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "a<|im_end|>b", "a <|im_end|> b", " <|im_end|>", "<|im_end|> ",
    "<|im_end|><|im_end|>", "<|im_end", "|im_end|>", "<|im_end|", "<| im_end |>", "<|IM_END|>", "<<|im_end|>>", "<|im_start|><|im_end|>\n", "<repo_name>x/y<file_sep>src/lib.rs\n", "<reponame>",
    "<filename>a.py<gh_stars>100-1000", "<jupyter_code>print(1)<empty_output>", "<issue_start>a<issue_comment>b<issue_closed>", "1<|im_end|>2", "½<|im_end|>٣", "<|unknown|>", "</s><s>[INST]",
]  # fmt: skip


def slices(text: str, count: int, length: int) -> list[str]:
    """Evenly spaced pieces of `text`; a step that is no round number, so that they start inside words too."""
    step = len(text) // count
    return [text[i * step : i * step + length] for i in range(count)]


def everything(book: str) -> list[str]:
    """All texts once, in order."""
    texts = NUMBERS + WHITESPACE + ENGLISH + CODE + LANGUAGES + EMOJI + SPECIAL
    texts += slices(book, 40, 160) + slices(book, 3, 3000)
    return list(dict.fromkeys(texts))
