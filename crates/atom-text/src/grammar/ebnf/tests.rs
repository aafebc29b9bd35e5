//! What grammars in EBNF allow, beside a matcher that knows nothing of terminals, and what is refused.

use super::super::tests::{allowed, refusal, vocabulary};
use super::*;
use crate::testing::byte_tokenizer;
use crate::{GrammarSource, Tokenizer};
use std::collections::BTreeSet;

struct Held {
    tokenizer: Tokenizer,
    grammar: crate::grammar::Grammar,
}

fn held(text: &str) -> Held {
    let source = GrammarSource::of_grammar(text.into());
    assert!(matches!(source, GrammarSource::Ebnf(_)), "{text}");
    let tokenizer = byte_tokenizer();
    let grammar = vocabulary(&tokenizer).compile(&source);
    let grammar = grammar.unwrap_or_else(|error| panic!("{error}: {text}: {:?}", to_lark(text, "")));
    Held { tokenizer, grammar }
}

impl Held {
    /// True if a text follows the grammar as a whole, byte by byte.
    fn follows(&self, text: &str) -> bool {
        let mut constraint = self.grammar.start();
        for byte in text.bytes() {
            if !allowed(&mut constraint, self.tokenizer.vocab_size()).contains(&byte.into()) {
                return false;
            }
            constraint.advance(byte.into()).unwrap();
        }
        constraint.is_complete().unwrap()
    }
}

#[track_caller]
fn check(grammar: &str, fits: &[&str], breaks: &[&str]) {
    let held = held(grammar);
    for text in fits {
        assert!(held.follows(text), "{text:?} follows {grammar}: {}", to_lark(grammar, "").unwrap());
    }
    for text in breaks {
        assert!(!held.follows(text), "{text:?} does not follow {grammar}");
    }
}

/// Where parts that begin at each place end: for each rule, until nothing changes.
struct Reference {
    ebnf: Ebnf,
    text: Vec<char>,
    ends: Vec<Vec<BTreeSet<usize>>>, // [rules, places]
}

impl Reference {
    fn follows(grammar: &str, text: &str) -> bool {
        let (ebnf, text): (_, Vec<char>) = (parse::parse(grammar).unwrap(), text.chars().collect());
        let ends = vec![vec![BTreeSet::new(); text.len() + 1]; ebnf.rules.len()];
        let mut reference = Self { ebnf, text, ends };
        loop {
            let mut is_changed = false;
            for rule in 0..reference.ebnf.rules.len() {
                for at in 0..=reference.text.len() {
                    let ends = reference.ends_of(reference.ebnf.rules[rule].body, at);
                    is_changed |= ends != reference.ends[rule][at];
                    reference.ends[rule][at] = ends;
                }
            }
            if !is_changed {
                return reference.ends[reference.ebnf.root][0].contains(&reference.text.len());
            }
        }
    }

    fn ends_of(&self, node: usize, at: usize) -> BTreeSet<usize> {
        let behind =
            |ends: &BTreeSet<usize>, node| ends.iter().flat_map(|&at| self.ends_of(node, at)).collect();
        match &self.ebnf.nodes[node] {
            Node::Chars(ranges) => {
                let fits = |c: &char| ranges.iter().any(|(first, last)| first <= c && c <= last);
                self.text.get(at).filter(|c| fits(c)).map(|_| at + 1).into_iter().collect()
            }
            Node::Text(text) => {
                let text: Vec<char> = text.chars().collect();
                self.text[at..].starts_with(&text).then_some(at + text.len()).into_iter().collect()
            }
            Node::Rule(rule) => self.ends[*rule][at].clone(),
            Node::Sequence(parts) => {
                parts.iter().fold(BTreeSet::from([at]), |ends, &part| behind(&ends, part))
            }
            Node::Choice(parts) => parts.iter().flat_map(|&part| self.ends_of(part, at)).collect(),
            &Node::Repeat { of, least, most } => {
                let (mut now, mut all) = (BTreeSet::from([at]), BTreeSet::new());
                // More often than there are characters adds nothing but nothing.
                let most = most.unwrap_or(least.max(1) + self.text.len() as u32);
                for count in 0..=most {
                    if count >= least {
                        all.extend(&now);
                    }
                    now = behind(&now, of);
                }
                all
            }
        }
    }
}

/// All texts of these characters up to a length.
fn texts(alphabet: &str, length: usize) -> Vec<String> {
    let mut all = vec![String::new()];
    let mut last = all.clone();
    for _ in 0..length {
        last = last.iter().flat_map(|text| alphabet.chars().map(move |c| format!("{text}{c}"))).collect();
        all.extend(last.iter().cloned());
    }
    all
}

/// Terminals that run into each other, that go on in another, in recursion and without, on both sides of a rule.
#[test]
fn the_texts_of_a_grammar_are_those_that_a_matcher_over_characters_finds() {
    for (grammar, alphabet, length) in [
        ("root ::= \"ab\" | \"a\"", "ab", 4),
        ("root ::= [a-z]* \"end\"", "end", 6),
        // The same beside recursion, where no terminal can be the whole of it.
        ("root ::= \"(\" root \")\" | [a-e]* \"ed\"", "(ed)", 6),
        ("root ::= word root word | \"\"\nword ::= [ab]+", "ab", 5),
        ("root ::= \"a\" root \"a\" | \"a\"", "ab", 7),
        ("root ::= \"a\" root \"b\" | \"ab\" root | \"\"", "ab", 6),
        ("root ::= word (\" \" root)? | \"(\" root \")\"\nword ::= \"if\" | [a-z]+", "if (", 5),
        ("root ::= x root? y\nx ::= \"ab\" | \"a\"\ny ::= \"bc\" | \"c\"", "abc", 6),
        ("root ::= e\ne ::= e \"+\" t | t\nt ::= [0-9]+ | \"(\" e \")\"", "1+()", 5),
        ("root ::= \"é\" root \"è\" | [é-í]+ \"x\"", "éèx", 5),
        // Right and left recursion that is none.
        (
            "root ::= \"\\\"\" chars \"\\\"\"\nchars ::= \"\" | [^\"\\\\] chars | \"\\\\\" [n] chars",
            "\"\\na",
            5,
        ),
        ("root ::= root \"ab\" | \"a\"", "ab", 6),
        ("root ::= (\"a\" root)? ", "ab", 4),
        // Through each other.
        ("root ::= \"a\" b | \"\"\nb ::= \"b\" root | \"c\"", "abc", 5),
        ("root ::= (root2 \"a\"){1,2}\nroot2 ::= (\"b\" root2 \"b\") | \"a\"{2}", "ab", 6),
        // Nothing, in many ways.
        ("root ::= (\"a\"? \"b\"*)* ws root \"c\" | ws\nws ::= | \" \" ws", "abc ", 4),
        ("root ::= \"a\"{0} \"b\"{2,3} | \"c\"{2,}", "abc", 5),
    ] {
        let held = held(grammar);
        let mut fit = 0;
        for text in texts(alphabet, length) {
            let expected = Reference::follows(grammar, &text);
            fit += usize::from(expected);
            assert_eq!(
                held.follows(&text),
                expected,
                "{text:?}: {grammar}\n{}",
                to_lark(grammar, "").unwrap()
            );
        }
        assert!(fit > 0, "{grammar}: nothing fits");
    }
}

#[test]
fn literals_classes_and_their_escapes_are_read_as_llama_cpp_and_xgrammar_read_them() {
    check(r#"root ::= "a\"\\\n\t\r\x41\u00e9\U0001F980\/\[""#, &["a\"\\\n\t\rAé🦀/["], &["a"]);
    check(r#"root ::= "\b\f\a\v\0\e\x7f""#, &["\u{8}\u{c}\u{7}\u{b}\0\u{1b}\u{7f}"], &[""]);
    check(r#"root ::= "<i>i" [/] "日本""#, &["<i>i/日本"], &["<i>i日本"]);
    check(r"root ::= [a\-c\]\\^-]+", &["a-c]\\^"], &["b"]);
    check(r"root ::= [-a]+ [a-]", &["-a-", "aa"], &["a", "b-"]);
    check(r"root ::= [^a-y\n]", &["z", "A", "é", "🦀"], &["a", "m", "\n", "zz", ""]);
    check(r"root ::= [^]{2}", &["\nx", "日a"], &["a"]);
    check(r"root ::= .", &["\n", "x", "日"], &["", "xx"]);
    check(r"root ::= [\x41-\x43\u4e00-\u9fff]+", &["ABC日"], &["D", "é"]);
    check(r"root ::= [^\x00-\x7F]", &["é"], &["a"]);
}

#[test]
fn comments_lines_groups_and_repetitions_may_be_anywhere() {
    let grammar = "# first\n\n  root ::= # \"no\"\n  (\n    # a group\n    \"1. \" move\n  ) ( \"\\n\" move ) {1,2}\n\
        \tmove::=pawn|\n  \"O-O\" |\n  () [+#] ?\npawn ::= [a-h] [1-8]\n# last";
    check(grammar, &["1. e4\nO-O", "1. \n#\n"], &["1. e4", "1. e4\na1\na2\na3", "e4\ne4"]);
    check("root ::= a-b_c.d1\r\na-b_c.d1 ::= \"x\"\r\n", &["x"], &[""]);
    check("root ::= \"a\" * \"b\" {2}", &["bb", "aabb"], &["ab"]);
    // What nobody names is no hindrance.
    check("root ::= \"a\"\nother ::= root other?", &["a"], &["aa"]);
}

/// As llama.cpp has it.
const JSON: &str = r##"root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"##;

#[test]
fn json_in_ebnf_is_json_and_its_strings_stay_whole_terminals() {
    let fits = ["{}", "{ \"a\": [1, -2.5e+1, true, {\"b\\\"\\u00e9\": null}]\n\t}", "{\"é🦀\":\"\"}"];
    check(JSON, &fits, &["[]", "{\"a\"}", "{\"a\": 01x}", "{\"a\": \"\u{7f}\"}", "{\"a\": 1,}"]);
    let lark = to_lark(JSON, "").unwrap();
    let terminals = lark.lines().filter(|line| line.starts_with('T')).count();
    assert!(terminals < 12, "{terminals} terminals: {lark}");
    // xgrammar's way to write a string.
    let string = "root ::= \"[\" (root | s) \"]\"\ns ::= \"\\\"\" rest \"\\\"\"\nrest ::= \"\" | [^\"\\\\] rest | \"\\\\\" e rest\ne ::= [\"\\\\/bfnrt]";
    check(string, &["[\"\"]", "[[\"a\\n\"]]"], &["[\"]", "[\"a\\x\"]"]);
    let lark = to_lark(string, "").unwrap();
    assert_eq!(lark.lines().filter(|line| line.starts_with('r')).count(), 1, "{lark}");
}

#[test]
fn a_text_behind_a_grammar_ends_it() {
    let tokenizer = byte_tokenizer();
    for grammar in ["root ::= [a-z]+", "root ::= [a-z]+ | \"(\" root \")\""] {
        let lark = GrammarSource::Lark(to_lark(grammar, "end").unwrap());
        let held =
            Held { grammar: vocabulary(&tokenizer).compile(&lark).unwrap(), tokenizer: byte_tokenizer() };
        assert!(held.follows("aend") && held.follows("endend") && !held.follows("end") && !held.follows("a"));
    }
}

#[test]
fn ebnf_is_told_from_lark_by_a_definition_at_the_beginning_of_a_line() {
    for text in [
        "root ::= \"a\"",
        "# x\n\troot\n  ::= \"a\"",
        "a: \"b\"\nroot::=a",
        "root[temperature=0.7] ::= \"a\"",
    ] {
        assert!(is_ebnf(text), "{text}");
    }
    for text in [
        "start: \"::=\"",
        "start: \"a ::= b\"",
        "start: \"a\" // root ::= x",
        "# root ::= x\nstart: \"a\"",
        "",
        "::=",
    ] {
        assert!(!is_ebnf(text), "{text}");
        assert!(matches!(GrammarSource::of_grammar(text.into()), GrammarSource::Lark(_)));
    }
}

#[test]
fn what_is_not_taken_is_refused_with_its_line_and_why() {
    let deep = format!("root ::= {}\"a\"{}", "(".repeat(30), ")".repeat(30));
    for (grammar, expected) in [
        ("a ::= \"x\"", "no rule \"root\""),
        ("root ::= a\n\na ::= b", "line 3: there is no rule \"b\""),
        ("root ::= \"a\"\nroot ::= \"b\"", "line 2: the rule \"root\" is defined twice"),
        ("root ::= \"a\" b ::= \"c\"", "line 1: the rule \"b\" has to begin on a line"),
        ("root ::= \"a\n\"", "line 1: a text has no closing"),
        ("root ::= [a\n]", "line 1: a class of characters has no closing"),
        ("root ::=\n  [z-a]", "line 2: the range 'z' to 'a'"),
        ("root ::= []", "no character"),
        ("root ::= \"\\q\"", "'\\q' is no escape"),
        ("root ::= [\\d]", "'\\d' is no escape"),
        ("root ::= \"\\x4\"", "'\\x' needs 2"),
        ("root ::= \"\\x41BC\"", "read in different ways"),
        ("root ::= \"\\ud83d\"", "no character"),
        ("root ::= (\"a\"", "')' is missing"),
        ("root ::= \"a\")", "line 1: a rule"),
        ("root ::= * \"a\"", "nothing before '*'"),
        ("root ::= \"a\"++", "'+' behind another repetition"),
        ("root ::= \"a\"{,4}", "{,4} is none of"),
        ("root ::= \"a\"{4,2}", "{4,2} is none of"),
        ("root ::= \"a\"{2", "{} is none of"),
        ("root ::= \"a\"{1,4000000}", "100000"),
        ("root ::= 'a'", "double quotes"),
        ("root ::= <tool>", "tokens can't be named"),
        ("root ::= \"a\" (= \"b\")", "lookahead"),
        ("root ::= Token(3)", "Token(..) is not taken"),
        ("root ::= TagDispatch((\"a\", b))\nb ::= \"c\"", "TagDispatch(..) is not taken"),
        ("root[temperature=0.7] ::= \"a\"", "options of a rule (\"root\")"),
        ("root ::= \"a\" // comment", "line 1: '/' begins nothing"),
        (&deep, "nested more than 24"),
        ("root ::= root", "line 1: no finite text follows the rule \"root\""),
        ("root ::= \"a\" root", "no finite text"),
        (
            "root ::= \"a\" | x\nx ::= \"b\" y\ny ::= \"c\" x{1,2}",
            "line 1: no finite text follows the rule \"x\"",
        ),
    ] {
        let text = refusal(&GrammarSource::of_grammar(grammar.into()));
        assert!(text.contains(expected) && text.len() < 1000, "{grammar}: {text}");
    }
    // Each refers to the one before twice: endless when it is written out.
    for of in ["[a-z]+ \"b\"", "\"\""] {
        let first = format!("root ::= \"(\" root \")\" | a40\na0 ::= {of}\n");
        let doubled = (0..40).fold(first, |text, i| text + &format!("a{} ::= a{i} a{i}\n", i + 1));
        let words = refusal(&GrammarSource::of_grammar(doubled));
        assert!(words.contains("too large"), "{words}");
    }
}

/// As many rules as fit into a source, each named by the one before, as terminals and as rules.
#[test]
fn a_long_chain_of_rules_in_ebnf_is_no_stack_overflow() {
    for end in ["\"x\"", "\"x\" | \"(\" root \")\""] {
        let chain: String = (0..10_000).map(|i| format!("a{i} ::= a{}\n", i + 1)).collect();
        let grammar = format!("root ::= a0\n{chain}a10000 ::= {end}\n");
        match vocabulary(&byte_tokenizer()).compile(&GrammarSource::of_grammar(grammar)) {
            Ok(grammar) => {
                let held = Held { tokenizer: byte_tokenizer(), grammar };
                assert!(held.follows("x") && !held.follows("xx"));
            }
            Err(error) => assert!(error.is_clients_fault(), "{error}"),
        }
    }
}
