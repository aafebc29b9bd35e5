//! Answers that end before the model ended them.

use super::*;

const CUT: AnswerEnd = AnswerEnd::Cut;

fn calls() -> Vec<(&'static str, Value)> {
    let hard = json!({"s": "a}\"<b\n", "o": {"c": [{}, "</x>"]}, "n": -7, "b": true});
    vec![("get_weather", json!({"s": "東京 🦀"})), ("f", hard), ("f", json!({}))]
}

/// A call without a name was shown as content, its markers with it. Of a marker nothing but punctuation may
/// be, since an answer may be that.
#[test]
fn wherever_an_answer_is_cut_it_says_a_beginning_of_itself_and_no_marker() {
    for dialect in dialects() {
        let is_bare = dialect.tools == Some(ToolFormat::Llama3Json) && !is_harmony(dialect);
        let content = if is_bare { "" } else { "Let me see: {1} < [2].\n" };
        let calls = if dialect.tools.is_some() { calls() } else { Vec::new() };
        let text = answer_text(dialect, "hm <x> 考え", content, &calls);
        let whole = read(dialect, AnswerStart::Content, &[&text]);
        assert_eq!(whole.calls.len(), calls.len(), "{dialect:?}");
        for (at, _) in text.char_indices() {
            let said = read_to(CUT, dialect, AnswerStart::Content, &[&text[..at]]);
            let case = format!("{dialect:?}: {:?}", &text[..at]);
            assert_begins(&whole.reasoning, &said.reasoning, &case);
            assert_begins(&whole.content, &said.content, &case);
            assert!(said.calls.len() <= whole.calls.len(), "{case}");
            for (said, whole) in said.calls.iter().zip(&whole.calls) {
                assert_eq!((&said.0, &said.1), (&whole.0, &whole.1), "{case}");
                assert!(whole.2.starts_with(&said.2), "{said:?} begins no {whole:?}: {case}");
            }
        }
    }
}

/// `said` is a beginning of `whole`, and punctuation behind it that may have begun a marker.
#[track_caller]
fn assert_begins(whole: &str, said: &str, case: &str) {
    let same: usize =
        whole.chars().zip(said.chars()).take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum();
    let rest = &said[same..];
    assert!(!rest.contains(char::is_alphanumeric), "{said:?} begins no {whole:?}: {case}");
}

#[test]
fn a_call_that_is_cut_before_its_name_is_known_says_nothing() {
    let cases: &[(ToolFormat, &str, &str)] = &[
        (ToolFormat::Hermes, "Hm.\n<tool_call>", "Hm.\n"),
        (ToolFormat::Hermes, "<tool_call>\n{\"name\": \"get_w", ""),
        (ToolFormat::Hermes, "<tool_call>{\"arguments\": {\"a\": 1}", ""),
        (
            ToolFormat::Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n<tool_call>{\"na",
            "@f{}",
        ),
        (ToolFormat::Qwen3Coder, "<tool_call>\n<function=get_", ""),
        (ToolFormat::Qwen3Coder, "<function=get_", ""),
        (ToolFormat::Glm45, "<tool_call>get_wea", ""),
        (ToolFormat::Mistral, "[TOOL_CALLS]get_weather", ""),
        (ToolFormat::Mistral, "[TOOL_CALLS][{\"name\"", ""),
        (ToolFormat::KimiK2, "<|tool_calls_section_begin|><|tool_call_begin|>functions.f", ""),
        (ToolFormat::DeepseekV4, "a <｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f", "a "),
        // What is no call is text.
        (ToolFormat::Hermes, "<tool_call> is the tag", "<tool_call> is the tag"),
        (ToolFormat::Glm45, "the <tool_call> tag is", "the <tool_call> tag is"),
    ];
    for (format, text, expected) in cases {
        let said = line_to(CUT, dialect(None, Some(*format)), AnswerStart::Content, text);
        assert_eq!(said, *expected, "{text:?}");
    }
}

/// An answer in JSON is no call, as long as it doesn't begin like one of an offered tool.
#[test]
fn a_cut_answer_in_json_is_text_where_calls_are_bare_objects() {
    let dialect = dialect(None, Some(ToolFormat::Llama3Json));
    let cases = [
        ("{", "{"),
        ("{\"", "{\""),
        ("{\"na", ""),
        ("{\"name\": \"get_w", ""),
        ("{\"type\": \"function\", \"name\": ", ""),
        ("{\"name\": \"f\", \"para", ""),
        ("{\"parameters\": {\"a\": 1}, ", ""),
        ("<|python_tag|>{\"x", ""),
        ("{\"name\": \"Al", "{\"name\": \"Al"),
        ("{\"names\": [", "{\"names\": ["),
        ("{\"type\": \"object\", \"pro", "{\"type\": \"object\", \"pro"),
        ("{\"name\": \"f\", \"age\": 3", "{\"name\": \"f\", \"age\": 3"),
        ("{\"a\": [1, 2], ", "{\"a\": [1, 2], "),
    ];
    for (text, expected) in cases {
        assert_eq!(line_to(CUT, dialect, AnswerStart::Content, text), expected, "{text:?}");
    }
}

#[test]
fn a_cut_answer_of_punctuation_is_all_there() {
    for dialect in dialects().filter(|dialect| !is_harmony(*dialect)) {
        for text in ["<", "[", "{", "</", "a <", "a [", "a <|"] {
            let said = read_to(CUT, dialect, AnswerStart::Content, &[text]);
            assert_eq!(said.content, text, "{dialect:?}");
        }
    }
}

#[test]
fn it_is_known_whether_a_call_was_cut() {
    let cases = [
        ("<tool_call>{\"name\": \"f\", ", true),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1", true),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}", false),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_", false),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call><tool_call>{\"na", false),
        ("text", false),
    ];
    for (text, expected) in cases {
        let dialect = dialect(None, Some(ToolFormat::Hermes));
        let mut parser = AnswerParser::new(dialect, AnswerStart::Content, tools());
        let mut parts = Vec::new();
        parser.push(text, &mut parts);
        parser.finish(CUT, &mut parts);
        assert_eq!(parser.is_call_cut(), expected, "{text:?}");
    }
}
