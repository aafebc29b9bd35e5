//! The text that a `custom` tool takes, out of the JSON arguments that the model wrote.

/// The one parameter of the function that stands for a custom tool.
pub(super) const INPUT: &str = "input";

/// Takes arguments piece by piece and gives the text that they hold: the value of [`INPUT`] where they are an
/// object that begins with it, as the schema says, else the arguments themselves; no arguments are no text. Decided
/// character by character, so that the cuts don't matter; within the text only an unfinished escape is held back.
#[derive(Clone, Debug)]
pub(super) struct InputText {
    at: At,
    /// What is decided by what follows: the beginning of the object, or of an escape.
    held: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Before the text, with this many symbols of `{"input":"` seen.
    Head(usize),
    Text,
    Escape,
    /// Behind the text.
    End,
    /// These are no such arguments.
    Raw,
}

impl InputText {
    pub(super) fn new() -> Self {
        Self { at: At::Head(0), held: String::new() }
    }

    /// What comes out for the next piece.
    pub(super) fn push(&mut self, piece: &str) -> String {
        let mut out = String::new();
        for c in piece.chars() {
            self.read(c, &mut out);
        }
        out
    }

    fn read(&mut self, c: char, out: &mut String) {
        match self.at {
            At::Head(seen) => self.head(c, seen, out),
            At::Text => match c {
                '"' => self.at = At::End,
                '\\' => {
                    self.held.push(c);
                    self.at = At::Escape;
                }
                _ => out.push(c),
            },
            At::Escape => {
                self.held.push(c);
                self.escape(out);
            }
            At::End => {}
            At::Raw => out.push(c),
        }
    }

    fn head(&mut self, c: char, seen: usize, out: &mut String) {
        self.held.push(c);
        let expected = SYMBOLS.chars().nth(seen);
        // Between symbols, and not within the name.
        let may_be_blank = matches!(seen, 0 | 1) || seen + 2 >= SYMBOLS.len();
        if expected == Some(c) {
            self.at = At::Head(seen + 1);
            if seen + 1 == SYMBOLS.len() {
                self.held.clear();
                self.at = At::Text;
            }
        } else if seen == 1 && c == '}' {
            self.at = At::End;
        } else if !(may_be_blank && matches!(c, ' ' | '\n' | '\r' | '\t')) {
            out.push_str(&std::mem::take(&mut self.held));
            self.at = At::Raw;
        }
    }

    /// Ends the escape if it is complete. The upper half of a character waits for the lower one.
    fn escape(&mut self, out: &mut String) {
        let held = std::mem::take(&mut self.held);
        self.at = At::Text;
        let goes_on = |this: &mut Self| {
            this.held = held.clone();
            this.at = At::Escape;
        };
        let (c, rest) = match held.chars().nth(1) {
            Some('u') => match unit(&held) {
                Unit::Going => return goes_on(self),
                Unit::Broken => {
                    ('\u{fffd}', held.char_indices().next_back().map_or("", |(at, _)| &held[at..]))
                }
                Unit::Whole(upper @ 0xD800..0xDC00) => match unit(&held[6..]) {
                    Unit::Going => return goes_on(self),
                    Unit::Whole(lower @ 0xDC00..0xE000) => {
                        let code = 0x10000 + (u32::from(upper & 0x3FF) << 10) + u32::from(lower & 0x3FF);
                        (char::from_u32(code).unwrap_or('\u{fffd}'), "")
                    }
                    Unit::Whole(_) | Unit::Broken => ('\u{fffd}', &held[6..]),
                },
                Unit::Whole(code) => (char::from_u32(code.into()).unwrap_or('\u{fffd}'), ""),
            },
            Some('n') => ('\n', ""),
            Some('r') => ('\r', ""),
            Some('t') => ('\t', ""),
            Some('b') => ('\u{8}', ""),
            Some('f') => ('\u{c}', ""),
            Some(c @ ('"' | '\\' | '/')) => (c, ""),
            // A backslash that begins no escape is one.
            _ => ('\\', &held[1..]),
        };
        out.push(c);
        rest.chars().for_each(|c| self.read(c, out));
    }
}

/// What a text is that should be `\uXXXX`.
enum Unit {
    /// The beginning of one.
    Going,
    Whole(u16),
    Broken,
}

fn unit(text: &str) -> Unit {
    let fits = |(at, c): (usize, char)| match at {
        0 => c == '\\',
        1 => c == 'u',
        _ => c.is_ascii_hexdigit(),
    };
    if !text.chars().take(6).enumerate().all(fits) {
        return Unit::Broken;
    }
    match text.get(2..6).map(|hex| u16::from_str_radix(hex, 16)) {
        Some(Ok(unit)) => Unit::Whole(unit),
        _ => Unit::Going,
    }
}

/// What arguments begin with, up to the text.
const SYMBOLS: &str = "{\"input\":\"";

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&str]) -> String {
        let mut text = InputText::new();
        pieces.iter().map(|piece| text.push(piece)).collect()
    }

    #[test]
    fn the_text_is_the_value_of_the_one_parameter_however_it_was_cut() {
        let cases = [
            (
                r#"{"input": "*** Begin Patch\n+é\t\"x\" \\n\n*** End Patch"}"#,
                "*** Begin Patch\n+é\t\"x\" \\n\n*** End Patch",
            ),
            ("{\n  \"input\" :\t\"a\"\n}", "a"),
            (r#"{"input":"\u00e9\ud83e\udd80\/"}"#, "é🦀/"),
            (r#"{"input":""}"#, ""),
            (r#"{"input":"cut off\"#, "cut off"),
            (r#"{"input":"cut \u00"#, "cut "),
            (r#"{"input"#, ""),
            (r#"{"#, ""),
            ("{}", ""),
            ("", ""),
            ("free text", "free text"),
            (r#"{"patch": "x"}"#, r#"{"patch": "x"}"#),
            (r#"{"input": 5}"#, r#"{"input": 5}"#),
            (r#"{"in put": "x"}"#, r#"{"in put": "x"}"#),
        ];
        for (arguments, expected) in cases {
            assert_eq!(read(&[arguments]), expected, "{arguments}");
            let chars: Vec<String> = arguments.chars().map(String::from).collect();
            let pieces: Vec<&str> = chars.iter().map(String::as_str).collect();
            assert_eq!(read(&pieces), expected, "{arguments}, one by one");
        }
    }

    #[test]
    fn half_a_character_is_none_and_ends_where_it_ends() {
        for (arguments, expected) in [
            (r#"{"input":"\ud83ex"}"#, "\u{fffd}x"),
            (r#"{"input":"\ud83e"}."#, "\u{fffd}"),
            (r#"{"input":"\ud83e\n\udd80."}"#, "\u{fffd}\n\u{fffd}."),
            (r#"{"input":"\u00é."}"#, "\u{fffd}é."),
            (r#"{"input":"C:\dir\q."}"#, "C:\\dir\\q."),
        ] {
            assert_eq!(read(&[arguments]), expected, "{arguments}");
        }
    }
}
