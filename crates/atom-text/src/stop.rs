//! Stop strings in a stream of text.

use crate::TextError;
use atom_base::limits;

/// Finds the first stop string in a stream of text deltas and ends the text before it.
///
/// The rule: of all places where a stop string occurs, the one that *ends* earliest counts; of several
/// strings that end there, the longest. The text is cut where that one begins. This is what a reader
/// sees who looks at the text character by character, so it doesn't depend on how the text was cut into
/// deltas. Text is held back only while it could still turn out to be the beginning of a stop string.
#[derive(Clone, Debug)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
    /// Text that was pushed and not emitted: the longest end that begins some stop string.
    held: String,
    emitted: String,
    matched: Option<usize>,
}

/// What became certain with one delta.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped<'a> {
    /// Text to pass on.
    pub text: &'a str,
    /// Index of the stop string that ended the text, once there is one.
    pub matched: Option<usize>,
}

/// One stop string and how much of it the text ends with (Knuth, Morris, Pratt, 1977).
#[derive(Clone, Debug)]
struct Pattern {
    bytes: Box<[u8]>,
    /// `[len]`: after `i + 1` matching bytes, the longest proper prefix that they also end with.
    borders: Box<[u16]>,
    matching: usize,
}

// Positions within a stop string are kept in 16 bits.
const _: () = assert!(limits::STOP_STRING_BYTES_MAX <= u16::MAX as usize);

impl StopStrings {
    /// A matcher for one continuation. Refuses empty strings, and more or longer ones than the limits.
    pub fn new(stops: &[impl AsRef<str>]) -> Result<Self, TextError> {
        if stops.len() > limits::STOP_STRINGS_MAX {
            let reason =
                format!("has {} strings; at most {} are allowed", stops.len(), limits::STOP_STRINGS_MAX);
            return Err(TextError::Request { field: "stop".into(), reason });
        }
        let pattern = |(index, stop): (usize, &_)| {
            let stop: &str = AsRef::as_ref(stop);
            let refuse = |reason| TextError::Request { field: format!("stop[{index}]"), reason };
            match stop.len() {
                0 => Err(refuse("is empty; leave it out to stop nowhere".into())),
                1..=limits::STOP_STRING_BYTES_MAX => Ok(Pattern::new(stop)),
                bytes => Err(refuse(format!(
                    "has {bytes} bytes; at most {} are allowed",
                    limits::STOP_STRING_BYTES_MAX
                ))),
            }
        };
        Ok(Self {
            patterns: stops.iter().enumerate().map(pattern).collect::<Result<_, _>>()?,
            held: String::new(),
            emitted: String::new(),
            matched: None,
        })
    }

    /// Takes the next delta. After a match, nothing more is emitted.
    pub fn push(&mut self, delta: &str) -> Stopped<'_> {
        self.emitted.clear();
        if self.matched.is_some() {
            return Stopped { text: "", matched: self.matched };
        }
        let before = self.held.len();
        self.held.push_str(delta);
        let found = delta.bytes().enumerate().find_map(|(at, byte)| Some((at, self.step(byte)?)));
        if let Some((at, index)) = found {
            let end = before + at + 1;
            self.held.truncate(end - self.patterns[index].bytes.len());
            self.matched = Some(index);
            std::mem::swap(&mut self.held, &mut self.emitted);
        } else {
            let keep = self.patterns.iter().map(|pattern| pattern.matching).max().unwrap_or(0);
            // A prefix of a stop string begins where a character begins, so this is a boundary.
            self.emitted.extend(self.held.drain(..self.held.len() - keep));
        }
        Stopped { text: &self.emitted, matched: self.matched }
    }

    /// The end of the text: what was held back is no stop string after all.
    pub fn finish(&mut self) -> &str {
        self.emitted.clear();
        for pattern in &mut self.patterns {
            pattern.matching = 0;
        }
        std::mem::swap(&mut self.held, &mut self.emitted);
        &self.emitted
    }

    /// One byte further; the index of the stop string that it completes.
    fn step(&mut self, byte: u8) -> Option<usize> {
        let mut longest: Option<(usize, usize)> = None;
        for (index, pattern) in self.patterns.iter_mut().enumerate() {
            let bytes = pattern.bytes.len();
            if pattern.step(byte) && longest.is_none_or(|(_, other)| bytes > other) {
                longest = Some((index, bytes));
            }
        }
        longest.map(|(index, _)| index)
    }
}

impl Pattern {
    fn new(stop: &str) -> Self {
        let bytes: Box<[u8]> = stop.as_bytes().into();
        let mut borders = vec![0u16; bytes.len()];
        let mut border = 0;
        for at in 1..bytes.len() {
            while border > 0 && bytes[at] != bytes[border] {
                border = usize::from(borders[border - 1]);
            }
            border += usize::from(bytes[at] == bytes[border]);
            borders[at] = border as u16;
        }
        Self { bytes, borders: borders.into(), matching: 0 }
    }

    /// True when this byte completes the string.
    fn step(&mut self, byte: u8) -> bool {
        while self.matching > 0 && self.bytes[self.matching] != byte {
            self.matching = usize::from(self.borders[self.matching - 1]);
        }
        self.matching += usize::from(self.bytes[self.matching] == byte);
        // After a match the matcher is never stepped again, so `matching` needn't fall back here.
        self.matching == self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Draws;

    /// The rule of `StopStrings`, straight from its words.
    fn reference(text: &str, stops: &[&str]) -> (String, Option<usize>) {
        let ends = |end: usize| {
            let matches = stops.iter().enumerate().filter(|(_, stop)| text[..end].ends_with(**stop));
            matches.max_by_key(|(index, stop)| (stop.len(), usize::MAX - index)).map(|(index, _)| index)
        };
        let boundaries = text.char_indices().map(|(at, c)| at + c.len_utf8());
        match boundaries.into_iter().find_map(|end| Some((end, ends(end)?))) {
            Some((end, index)) => (text[..end - stops[index].len()].to_owned(), Some(index)),
            None => (text.to_owned(), None),
        }
    }

    fn stream(deltas: &[&str], stops: &[&str]) -> (String, Option<usize>) {
        let mut matcher = StopStrings::new(stops).unwrap();
        let (mut text, mut matched) = (String::new(), None);
        for delta in deltas {
            let stopped = matcher.push(delta);
            text.push_str(stopped.text);
            matched = stopped.matched;
        }
        text.push_str(matcher.finish());
        (text, matched)
    }

    #[test]
    fn the_match_that_ends_first_cuts_and_the_longest_of_those() {
        let cases: &[(&str, &[&str], &str, Option<usize>)] = &[
            ("hello world", &["wor"], "hello ", Some(0)),
            ("hello world", &["xyz"], "hello world", None),
            ("abcd", &["abcd", "bc"], "a", Some(1)),
            ("xab", &["b", "ab"], "x", Some(1)),
            ("xab", &["ab", "ab"], "x", Some(0)),
            ("aaab", &["aab"], "a", Some(0)),
            ("abababac", &["ababac"], "ab", Some(0)),
            ("n\n\nm", &["\n\n"], "n", Some(0)),
            ("días", &["í"], "d", Some(0)),
            ("", &["a"], "", None),
            ("text", &[], "text", None),
        ];
        for &(text, stops, expected, matched) in cases {
            let whole = stream(&[text], stops);
            assert_eq!(whole, (expected.to_owned(), matched), "{text:?} {stops:?}");
            assert_eq!(reference(text, stops), whole, "{text:?} {stops:?}");
        }
    }

    #[test]
    fn any_split_of_the_text_gives_the_one_shot_result() {
        let mut draws = Draws::new(21);
        let letters = ["a", "b", "é", "ê", "🦀"];
        let word = |draws: &mut Draws, most: usize| -> String {
            (0..1 + draws.below(most)).map(|_| letters[draws.below(letters.len())]).collect()
        };
        for _ in 0..20_000 {
            let text = word(&mut draws, 16);
            let stops: Vec<String> = (0..draws.below(4)).map(|_| word(&mut draws, 4)).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut deltas = Vec::new();
            let mut rest = text.as_str();
            while !rest.is_empty() {
                let take = 1 + draws.below(rest.chars().count());
                let at = rest.char_indices().nth(take).map_or(rest.len(), |(at, _)| at);
                deltas.push(&rest[..at]);
                rest = &rest[at..];
            }
            assert_eq!(stream(&deltas, &stops), reference(&text, &stops), "{deltas:?} {stops:?}");
        }
    }

    #[test]
    fn only_what_may_become_a_stop_string_is_held_back() {
        let mut matcher = StopStrings::new(&["</end>", "ab"]).unwrap();
        assert_eq!(matcher.push("one <").text, "one ");
        assert_eq!(matcher.push("/e").text, "");
        assert_eq!(matcher.push("a").text, "</e");
        assert_eq!(matcher.push("c").text, "ac");
        assert_eq!(matcher.push("x</en").text, "x");
        assert_eq!(matcher.finish(), "</en");
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn after_a_match_nothing_is_emitted() {
        let mut matcher = StopStrings::new(&["b"]).unwrap();
        assert_eq!(matcher.push("abc"), Stopped { text: "a", matched: Some(0) });
        assert_eq!(matcher.push("ab"), Stopped { text: "", matched: Some(0) });
        assert_eq!(matcher.finish(), "");
    }

    #[test]
    fn empty_long_and_many_stop_strings_are_refused_with_the_numbers() {
        let refused = |stops: &[String]| StopStrings::new(stops).unwrap_err().to_string();
        assert!(refused(&["a".into(), String::new()]).starts_with("stop[1]: is empty"));
        assert!(refused(&["a".repeat(1025)]).contains("1025 bytes; at most 1024"));
        assert!(refused(&vec!["a".into(); 17]).contains("17 strings; at most 16"));
    }
}
