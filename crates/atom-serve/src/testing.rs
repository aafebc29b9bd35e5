//! What the tests of several shapes need: answers in random parts and cuts, and the events of a stream.

use crate::choice::{Finish, Piece};
use crate::shape::{Shape, Usage};
use atom_base::rng;
use atom_text::AnswerPart;
use serde_json::Value;

/// Draws that are the same in every run.
pub(crate) struct Draws {
    seed: u64,
    at: u32,
}

impl Draws {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, at: 0 }
    }

    /// A number in `0 .. end`; 0 when that is empty.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.at += 1;
        (rng::uniform(self.seed, 5, self.at, 0) * end as f32) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// Up to five stretches of text, thoughts and calls in any order. The last call may be cut off.
    pub(crate) fn parts(&mut self) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        let (count, mut calls) = (self.below(6), 0);
        for at in 0..count {
            let text = self.pick(&["a", "é🦀", "\n\n", "line\nline \"quoted\" \\", "</think>", "{\"x\": 1}"]);
            match self.below(3) {
                0 => parts.push(AnswerPart::Content(text.into())),
                1 => parts.push(AnswerPart::Reasoning(text.into())),
                _ => {
                    let own = self.below(2) == 1;
                    let id = own.then(|| format!("functions.f:{calls}"));
                    parts.push(AnswerPart::Call { index: calls, id, name: format!("f{calls}") });
                    let mut json = serde_json::json!({"input": text, "list": [1, {"é": null}]}).to_string();
                    if at + 1 == count {
                        let mut end = self.below(json.len() + 1);
                        while !json.is_char_boundary(end) {
                            end -= 1;
                        }
                        json.truncate(end);
                    }
                    if !json.is_empty() {
                        parts.push(AnswerPart::Arguments { index: calls, json });
                    }
                    calls += 1;
                }
            }
        }
        parts
    }

    /// The same answer in pieces, cut anywhere between characters.
    pub(crate) fn pieces(&mut self, parts: &[AnswerPart], finish: Finish) -> Vec<Piece> {
        let mut pieces = vec![Piece::default()];
        let cut: Vec<_> = parts.iter().flat_map(|part| self.cut(part)).collect();
        for part in cut {
            if self.below(3) == 0 {
                pieces.push(Piece::default());
            }
            let last = pieces.last_mut().unwrap();
            last.append(Piece { parts: vec![part], ..Piece::default() });
        }
        pieces.retain(|piece| !piece.parts.is_empty());
        if self.below(2) == 0 || pieces.is_empty() {
            pieces.push(Piece::default());
        }
        pieces.last_mut().unwrap().finish = Some(finish);
        pieces
    }

    fn cut(&mut self, part: &AnswerPart) -> Vec<AnswerPart> {
        type Make = Box<dyn Fn(&str) -> AnswerPart>;
        let (text, make): (&str, Make) = match part {
            AnswerPart::Content(text) => (text, Box::new(|text| AnswerPart::Content(text.into()))),
            AnswerPart::Reasoning(text) => (text, Box::new(|text| AnswerPart::Reasoning(text.into()))),
            AnswerPart::Arguments { index, json } => {
                let index = *index;
                (json, Box::new(move |json| AnswerPart::Arguments { index, json: json.into() }))
            }
            AnswerPart::Call { .. } => return vec![part.clone()],
        };
        let mut cut = vec![String::new()];
        for character in text.chars() {
            if self.below(4) == 0 {
                cut.push(String::new());
            }
            cut.last_mut().unwrap().push(character);
        }
        cut.iter().filter(|text| !text.is_empty()).map(|text| make(text)).collect()
    }
}

/// All of an answer in one piece.
pub(crate) fn whole(parts: &[AnswerPart], finish: Finish) -> Piece {
    let mut whole = Piece::default();
    for part in parts {
        whole.append(Piece { parts: vec![part.clone()], ..Piece::default() });
    }
    whole.finish = Some(finish);
    whole
}

/// What the shape streams for these pieces: the name and the data of each event.
pub(crate) fn stream(shape: &mut impl Shape, pieces: &[Piece], usage: &Usage) -> Vec<(String, Value)> {
    let mut out = String::new();
    shape.begin(usage, &mut out);
    for piece in pieces {
        shape.piece(piece, usage, &mut out);
    }
    shape.end(usage, &mut out);
    events(&out)
}

/// The events of a stream, each checked to be one name and one line of data that repeats it.
pub(crate) fn events(text: &str) -> Vec<(String, Value)> {
    let text = text.strip_suffix("\n\n").expect("an event ends with a blank line");
    text.split("\n\n")
        .map(|event| {
            let (name, data) = event.split_once('\n').unwrap_or_else(|| panic!("one line in {event:?}"));
            let name = name.strip_prefix("event: ").unwrap_or_else(|| panic!("no name in {event:?}"));
            let data = data.strip_prefix("data: ").unwrap_or_else(|| panic!("no data in {event:?}"));
            assert!(!data.contains(['\n', '\r']), "a line break in {data:?}");
            let data: Value = serde_json::from_str(data).unwrap();
            assert_eq!(data["type"], name);
            (name.to_owned(), data)
        })
        .collect()
}
