//! Where a JSON value ends, character by character.

/// Follows strings and brackets of one JSON value. It doesn't judge the value: what isn't JSON passes, since
/// the arguments of a call are what the model wrote.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonText {
    /// The closing brackets that are owed, the next one last.
    closers: Vec<char>,
    is_string: bool,
    is_escaped: bool,
    /// A string that ends here is a value and not a key.
    is_value: bool,
    /// The beginning of the number or word at the end, as far as words of JSON go.
    word: String,
    last: Last,
}

/// What the text so far ends with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Last {
    #[default]
    Nothing,
    Open,
    /// A whole value.
    Value,
    /// Something that needs more: a key, a comma, a part of a number.
    Cut,
}

/// What a character was to a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Took {
    /// A part of it.
    More,
    /// Its last character.
    End,
    /// No part of it: the value, a number or a word, ended before.
    Before,
}

impl JsonText {
    pub(super) fn push(&mut self, c: char) -> Took {
        if self.is_string {
            return self.push_in_string(c);
        }
        let is_outside = self.closers.is_empty();
        match c {
            '"' if !(is_outside && self.is_begun()) => {
                self.end_word();
                self.is_string = true;
                self.is_value |= is_outside;
                self.last = Last::Cut;
            }
            '{' | '[' if !(is_outside && self.is_begun()) => {
                self.closers.push(if c == '{' { '}' } else { ']' });
                self.is_value = c == '[';
                self.word.clear();
                self.last = Last::Open;
            }
            _ if is_outside && matches!(c, '"' | '{' | '[' | '}' | ']' | ',' | ':') => return Took::Before,
            _ if is_outside && c.is_whitespace() => {
                return if self.is_begun() { Took::Before } else { Took::More };
            }
            '}' | ']' if self.closers.last() == Some(&c) => {
                self.closers.pop();
                self.word.clear();
                self.last = Last::Value;
                if self.closers.is_empty() {
                    return Took::End;
                }
            }
            '}' | ']' => self.last = Last::Cut,
            ':' | ',' => {
                self.is_value = c == ':' || self.closers.last() == Some(&']');
                self.word.clear();
                self.last = Last::Cut;
            }
            _ if c.is_whitespace() => self.end_word(),
            _ => self.push_in_word(c),
        }
        Took::More
    }

    fn push_in_string(&mut self, c: char) -> Took {
        match c {
            _ if self.is_escaped => self.is_escaped = false,
            '\\' => self.is_escaped = true,
            '"' => {
                self.is_string = false;
                self.last = if self.is_value { Last::Value } else { Last::Cut };
                if self.closers.is_empty() {
                    return Took::End;
                }
            }
            _ => {}
        }
        Took::More
    }

    fn push_in_word(&mut self, c: char) {
        if self.word.len() < WORD_BYTES_MAX {
            self.word.push(c);
        }
        let is_word = matches!(self.word.as_str(), "true" | "false" | "null");
        self.last = if is_word { Last::Value } else { Last::Cut };
    }

    /// White space after a number or a word shows that it is whole.
    fn end_word(&mut self) {
        if !self.word.is_empty() {
            self.word.clear();
            self.last = Last::Value;
        }
    }

    /// True from the first character that isn't white space.
    pub(super) fn is_begun(&self) -> bool {
        self.last != Last::Nothing
    }

    /// True between the quotes of a string.
    pub(super) fn is_in_string(&self) -> bool {
        self.is_string
    }

    /// The brackets that make the text so far a whole value, if nothing else is missing.
    pub(super) fn missing_brackets(&self) -> Option<String> {
        let is_whole = !self.is_string && matches!(self.last, Last::Open | Last::Value);
        is_whole.then(|| self.closers.iter().rev().collect())
    }
}

/// One more than the longest word of JSON, so that a longer one is never taken for it.
const WORD_BYTES_MAX: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_ends_where_json_says() {
        let cases = [
            (r#"{"a": "}"} x"#, r#"{"a": "}"}"#),
            (r#"  {"a":{"b":[1,{}]}}}"#, r#"  {"a":{"b":[1,{}]}}"#),
            (r#"{"a":"\"}\\"}}"#, r#"{"a":"\"}\\"}"#),
            (r#""a\"b", "c""#, r#""a\"b""#),
            ("12.5, 3", "12.5"),
            ("null}", "null"),
            ("true ", "true"),
            ("[[],[]]]", "[[],[]]"),
            (r#"{"城市": "東京{"}。"#, r#"{"城市": "東京{"}"#),
        ];
        for (text, expected) in cases {
            let mut value = JsonText::default();
            let mut taken = String::new();
            for c in text.chars() {
                match value.push(c) {
                    Took::More => taken.push(c),
                    Took::End => {
                        taken.push(c);
                        break;
                    }
                    Took::Before => break,
                }
            }
            assert_eq!(taken, expected, "{text}");
        }
    }

    #[test]
    fn only_brackets_are_ever_added() {
        let cases = [
            (r#"{"#, Some("}")),
            (r#"{"a": 1"#, None),
            (r#"{"a": 1 "#, Some("}")),
            (r#"{"a": "b"#, None),
            (r#"{"a": "b""#, Some("}")),
            (r#"{"a"#, None),
            (r#"{"a""#, None),
            (r#"{"a":"#, None),
            (r#"{"a": true"#, Some("}")),
            (r#"{"a": truer"#, None),
            (r#"{"a": [{"b": null"#, Some("}]}")),
            (r#"{"a": ["b""#, Some("]}")),
            (r#"{"a": 1,"#, None),
            (r#"{"a": {}"#, Some("}")),
        ];
        for (text, expected) in cases {
            let mut value = JsonText::default();
            for c in text.chars() {
                assert_eq!(value.push(c), Took::More, "{text}");
            }
            let closed = value.missing_brackets();
            assert_eq!(closed.as_deref(), expected, "{text}");
            if let Some(brackets) = closed {
                serde_json::from_str::<serde_json::Value>(&format!("{text}{brackets}")).unwrap();
            }
        }
    }
}
