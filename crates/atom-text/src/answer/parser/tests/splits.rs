//! However a text is cut, it says the same; and what may be said is said.

use super::*;
use crate::testing::Draws;

const ENDS: [AnswerEnd; 2] = [AnswerEnd::Whole, AnswerEnd::Cut];

/// Texts with everything that a parser may trip over, in one dialect.
fn corpus(dialect: Dialect) -> Vec<String> {
    let call = |name: &'static str, arguments: &str| (name, serde_json::from_str(arguments).unwrap());
    let calls =
        [call("f", r#"{"s": "a}\"<b", "o": {"c": [{}]}}"#), call("get_weather", r#"{"s": "東京 🦀"}"#)];
    let whole = answer_text(dialect, "hm <x> 考え", "Let me see: {1} < [2].\n", &calls);
    let written = written(dialect.tools.unwrap_or(ToolFormat::Hermes), &calls[..1]);
    let (open, close) = dialect.reasoning.and_then(ReasoningFormat::tags).unwrap_or(("<think>", "</think>"));
    vec![
        "".into(),
        "plain text, a < b, [x], {\"name\": 1}, 東京 🦀".into(),
        "  \n leading blanks".into(),
        whole.clone(),
        answer_text(dialect, "", "", &[call("f", "{}")]),
        answer_text(dialect, "a thought", "", &[call("nobody", r#"{"q": "\\\\"}"#)]),
        format!("{whole}\nand after it\n\n{written}"),
        // Within reasoning, and within reasoning that doesn't end.
        format!("{open}{written}{close}{written}"),
        format!("{open}never {written}"),
        format!("a {open}{open}b{close}{close} c {open}d{close}"),
        // Quoted, doubled, and cut off.
        format!("the marker `{}` is quoted", &written[..written.floor_char_boundary(11)]),
        format!("{}{written}", &written[..written.floor_char_boundary(14)]),
        format!("{written}{}", &written[..written.floor_char_boundary(20)]),
        whole[..whole.floor_char_boundary(whole.len() * 3 / 4)].to_owned(),
        written[..written.floor_char_boundary(written.len() / 2)].to_owned(),
        // Broken within.
        written.replace("\"s\"", "s\""),
        written.replace('f', " "),
        written.replace('>', ">oh no"),
        written.replace("\n", "\n\n  "),
        // Many.
        written.repeat(2),
    ]
}

#[test]
fn every_two_chunk_split_and_every_character_alone_read_as_one_shot() {
    for dialect in dialects() {
        // Without a format of reasoning, there is only one start.
        let starts = [AnswerStart::Content, AnswerStart::Reasoning];
        for start in starts.into_iter().take(1 + usize::from(dialect.reasoning.is_some())) {
            for (text, end) in
                corpus(dialect).into_iter().flat_map(|text| ENDS.map(|end| (text.clone(), end)))
            {
                let read = |deltas: &[&str]| read_to(end, dialect, start, deltas);
                let whole = read(&[&text]);
                let boundaries: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
                for &at in &boundaries {
                    let (first, second) = text.split_at(at);
                    assert_eq!(read(&[first, second]), whole, "{dialect:?} {first:?} | {second:?}");
                }
                let mut letters: Vec<&str> =
                    boundaries.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
                letters.extend(boundaries.last().map(|&at| &text[at..]));
                assert_eq!(read(&letters), whole, "{dialect:?} {text:?}");
            }
        }
    }
}

#[test]
fn random_texts_in_random_cuts_read_as_one_shot() {
    let mut draws = Draws::new(41);
    let dialects: Vec<Dialect> = dialects().collect();
    for _ in 0..6_000 {
        let dialect = dialects[draws.below(dialects.len())];
        let pieces = corpus(dialect);
        // Pieces of the corpus, cut anywhere and put together anyhow.
        let mut text = String::new();
        for _ in 0..1 + draws.below(5) {
            let piece = &pieces[draws.below(pieces.len())];
            let [from, to] = [0; 2].map(|_| piece.floor_char_boundary(draws.below(piece.len() + 1)));
            text.push_str(&piece[from.min(to)..from.max(to)]);
        }
        let start = [AnswerStart::Content, AnswerStart::Reasoning][draws.below(2)];
        let end = ENDS[draws.below(2)];
        let whole = read_to(end, dialect, start, &[&text]);
        let (mut deltas, mut rest) = (Vec::new(), text.as_str());
        while !rest.is_empty() {
            let (delta, after) = rest.split_at(rest.ceil_char_boundary(1 + draws.below(12)));
            deltas.push(delta);
            rest = after;
        }
        assert_eq!(read_to(end, dialect, start, &deltas), whole, "{dialect:?} {deltas:?}");
    }
}

/// Without markers, every character comes out, with a lag of at most one marker.
#[test]
fn text_that_begins_no_marker_is_held_no_longer_than_one_marker() {
    let mut draws = Draws::new(42);
    let letters =
        ["a", " ", "\n", "<", "</", "<|", "<｜", "[", "]", "{", "}", "\"", "<t", "城", "🦀", "`", "to="];
    for dialect in dialects() {
        let marker_bytes_max = dialect.markers().iter().map(|marker| marker.len()).max().unwrap_or(0);
        // An opening tag with a name in it isn't among the special tokens.
        let bound = marker_bytes_max.max(32) + BLANKS_BYTES_MAX;
        for start in [AnswerStart::Content, AnswerStart::Reasoning] {
            for _ in 0..20 {
                let text: String = std::iter::once("x")
                    .chain((0..200).map(|_| letters[draws.below(letters.len())]))
                    .collect();
                let mut parser = AnswerParser::new(dialect, start, tools());
                let (mut parts, mut pushed) = (Vec::new(), 0);
                for c in text.chars() {
                    parser.push(c.encode_utf8(&mut [0; 4]), &mut parts);
                    pushed += c.len_utf8();
                    let answer = Answer::of(&parts);
                    let said = answer.content.len() + answer.reasoning.len();
                    assert!(pushed - said <= bound, "{dialect:?}: {pushed} read, {said} said of {text:?}");
                }
                parser.finish(AnswerEnd::Whole, &mut parts);
                let answer = Answer::of(&parts);
                assert_eq!(answer.content + &answer.reasoning, text, "{dialect:?}");
            }
        }
    }
}

/// What was given out is never taken back, and arguments that come early are the beginning of the whole.
#[test]
fn every_beginning_of_an_answer_says_a_beginning_of_it() {
    for dialect in dialects() {
        for text in corpus(dialect) {
            let mut parser = AnswerParser::new(dialect, AnswerStart::Content, tools());
            let mut parts = Vec::new();
            parser.push(&text, &mut parts);
            parser.finish(AnswerEnd::Whole, &mut parts);
            let whole = Answer::of(&parts);
            let mut parser = AnswerParser::new(dialect, AnswerStart::Content, tools());
            let mut parts = Vec::new();
            for c in text.chars() {
                parser.push(c.encode_utf8(&mut [0; 4]), &mut parts);
                let so_far = Answer::of(&parts);
                assert!(whole.content.starts_with(&so_far.content), "{dialect:?} {text:?}");
                assert!(whole.reasoning.starts_with(&so_far.reasoning), "{dialect:?} {text:?}");
                for (early, late) in so_far.calls.iter().zip(&whole.calls) {
                    assert_eq!((&early.0, &early.1), (&late.0, &late.1), "{dialect:?} {text:?}");
                    assert!(late.2.starts_with(&early.2), "{dialect:?} {text:?}");
                }
                assert!(so_far.calls.len() <= whole.calls.len(), "{dialect:?} {text:?}");
            }
        }
    }
}

/// A whole answer says what went into it, in every dialect.
#[test]
fn what_a_model_writes_is_what_is_read() {
    for dialect in dialects() {
        for arguments in hard_arguments() {
            for count in [0, 1, 2, 5] {
                let calls: Vec<(&str, Value)> = vec![("f", arguments.clone()); count];
                for (thought, content) in [("", ""), ("why\nso?", ""), ("", "Look:"), ("hm 考え", "Look: é")]
                {
                    // Bare JSON is a call only where an answer begins with it.
                    let is_bare = dialect.tools == Some(ToolFormat::Llama3Json) && !is_harmony(dialect);
                    let content = if is_bare && count > 0 { "" } else { content };
                    let text = answer_text(dialect, thought, content, &calls);
                    let answer = read(dialect, AnswerStart::Content, &[&text]);
                    let has_calls = dialect.tools.is_some();
                    if !has_calls && is_harmony(dialect) && count > 0 {
                        continue;
                    }
                    let expected = if has_calls { calls.clone() } else { Vec::new() };
                    assert_eq!(answer.values(), expected, "{dialect:?} {text:?}");
                    if dialect.reasoning.is_some() {
                        assert_eq!(answer.reasoning, thought, "{dialect:?} {text:?}");
                        assert_eq!(answer.content, content, "{dialect:?} {text:?}");
                    }
                }
            }
        }
    }
}
