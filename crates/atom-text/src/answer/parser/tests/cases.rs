//! Named after what other servers got wrong.

use super::*;

const THINK: Option<ReasoningFormat> = Some(ReasoningFormat::Think);
const HERMES: Option<ToolFormat> = Some(ToolFormat::Hermes);
const CALL: &str = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";

fn check(dialect: Dialect, start: AnswerStart, cases: &[(&str, &str)]) {
    for (text, expected) in cases {
        assert_eq!(line(dialect, start, text), *expected, "{text:?}");
    }
}

#[test]
fn reasoning_present_absent_empty_unclosed_alone_and_over_lines() {
    check(
        dialect(THINK, None),
        AnswerStart::Content,
        &[
            ("<think>why</think>because", "[why]because"),
            ("no thought", "no thought"),
            ("<think></think>answer", "answer"),
            ("<think>\n\n</think>\n\nanswer", "answer"),
            ("<think>never ends", "[never ends]"),
            ("<think>only</think>", "[only]"),
            ("<think>\na\nb\n</think>\n\n  answer\n", "[a\nb\n]answer\n"),
            ("", ""),
        ],
    );
}

#[test]
fn text_before_a_close_that_the_template_opened_is_reasoning() {
    check(
        dialect(THINK, HERMES),
        AnswerStart::Reasoning,
        &[
            ("why</think>because", "[why]because"),
            ("\nwhy\n</think>\n\nbecause", "[why\n]because"),
            ("</think>because", "because"),
        ],
    );
}

#[test]
fn reasoning_may_come_again_behind_calls_and_a_tag_within_a_text_is_quoted() {
    check(
        dialect(THINK, None),
        AnswerStart::Content,
        &[
            ("so <think>why</think>because", "so <think>why</think>because"),
            ("\n<think>b</think>\n<think>d</think>e", "[bd]e"),
        ],
    );
}

#[test]
fn a_primed_prompt_with_long_reasoning_still_streams_as_reasoning() {
    let mut parser = AnswerParser::new(dialect(THINK, HERMES), AnswerStart::Reasoning, tools());
    let (thought, mut parts) = ("thinking ".repeat(40), Vec::new());
    for (read, c) in thought.chars().enumerate() {
        parser.push(c.encode_utf8(&mut [0; 4]), &mut parts);
        assert_eq!(Answer::of(&parts).reasoning.len(), read + 1);
    }
}

#[test]
fn an_answer_that_ends_in_thought_has_no_content() {
    let answer = read(dialect(THINK, HERMES), AnswerStart::Reasoning, &["because of the"]);
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("because of the", ""));
}

#[test]
fn with_thinking_disabled_a_close_tag_is_text() {
    let dialect = dialect(THINK, HERMES);
    let start = dialect.start("<|im_start|>assistant\n<think>\n\n</think>\n\n");
    assert_eq!(start, AnswerStart::Content);
    assert_eq!(line(dialect, start, "so </think> it is"), "so </think> it is");
    // Before anything else it says nothing: reasoning is closed already.
    assert_eq!(line(dialect, start, "\n</think>\n\nanswer"), "answer");
    // And without a reasoning format nothing is a tag.
    let none = Dialect { reasoning: None, tools: HERMES };
    assert_eq!(line(none, AnswerStart::Content, "<think>a</think>b"), "<think>a</think>b");
}

#[test]
fn the_prompt_says_where_reasoning_starts() {
    let think = dialect(THINK, None);
    let harmony = dialect(Some(ReasoningFormat::Harmony), None);
    let cases = [
        (think, "<|im_start|>assistant\n<think>\n", AnswerStart::Reasoning),
        (think, "<｜Assistant｜><think>", AnswerStart::Reasoning),
        (think, "<|im_start|>assistant\n<think>\nbegun by the client, ", AnswerStart::Reasoning),
        (think, "<|im_start|>assistant\n", AnswerStart::Content),
        (think, "<think>a</think>", AnswerStart::Content),
        // A user may ask about tags.
        (think, "What is <think>?<|im_end|>\n<|im_start|>assistant\n", AnswerStart::Content),
        (think, "[INST]What is <think>?[/INST]", AnswerStart::Content),
        (think, "User: What is <think>?\n\nAssistant:", AnswerStart::Content),
        (dialect(None, HERMES), "<think>", AnswerStart::Content),
        (dialect(Some(ReasoningFormat::Mistral), None), "[/INST][THINK]", AnswerStart::Reasoning),
        (dialect(Some(ReasoningFormat::MinimaxM3), None), "<mm:think>", AnswerStart::Reasoning),
        (harmony, "<|start|>assistant", AnswerStart::Content),
        (harmony, "<|start|>assistant<|channel|>analysis<|message|>", AnswerStart::Reasoning),
    ];
    for (dialect, tail, expected) in cases {
        assert_eq!(dialect.start(tail), expected, "{tail:?}");
    }
}

#[test]
fn a_tool_marker_in_reasoning_is_a_thought() {
    let dialect = dialect(THINK, HERMES);
    let text = format!("<think>perhaps {CALL}</think>{CALL}");
    assert_eq!(line(dialect, AnswerStart::Content, &text), format!("[perhaps {CALL}]@f{{\"a\": 1}}"));
}

#[test]
fn a_marker_quoted_in_prose_is_prose() {
    check(
        dialect(None, HERMES),
        AnswerStart::Content,
        &[
            ("The `<tool_call>` tag opens a call.", "The `<tool_call>` tag opens a call."),
            ("<tool_call> and </tool_call>", "<tool_call> and </tool_call>"),
        ],
    );
}

#[test]
fn an_answer_that_ends_within_a_marker_loses_nothing() {
    let dialect = dialect(THINK, HERMES);
    check(
        dialect,
        AnswerStart::Content,
        &[("a <tool_ca", "a <tool_ca"), ("a <thi", "a <thi"), ("a <", "a <")],
    );
    assert_eq!(line(dialect, AnswerStart::Reasoning, "a </thin"), "[a </thin]");
    // Behind a call, the beginning of its own closing tag says nothing.
    assert_eq!(line(dialect, AnswerStart::Content, &CALL[..CALL.len() - 4]), "@f{\"a\": 1}");
}

#[test]
fn an_unclosed_call_is_closed_where_only_brackets_are_missing() {
    let cases: &[(ToolFormat, &str, &str)] = &[
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b\"", "@f{\"a\": \"b\"}"),
        (
            ToolFormat::Hermes,
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [{\"b\": true",
            "@f{\"a\": [{\"b\": true}]}",
        ),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}", "@f{\"a\": 1}"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", ", "@f{}"),
        // Completing these would be an invention: the string, the number or the key may go on.
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b", "@f{\"a\": \"b"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1", "@f{\"a\": 1"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a", "@f{\"a"),
        (ToolFormat::Qwen3Coder, "<tool_call><function=f><parameter=n>1</parameter>\n</fun", "@f{\"n\": 1}"),
        (ToolFormat::Qwen3Coder, "<tool_call><function=f><parameter=s>Par", "@f{\"s\": \"Par"),
        (ToolFormat::Qwen3Coder, "<tool_call><function=f><parameter=n>1", "@f{\"n\": 1"),
        (ToolFormat::Glm45, "<tool_call>f\n<arg_key>s</arg_key><arg_value>a</arg_value>", "@f{\"s\": \"a\"}"),
        (ToolFormat::Mistral, "[TOOL_CALLS]f[ARGS]{\"a\": \"b\"", "@f{\"a\": \"b\"}"),
        (ToolFormat::Mistral, "[TOOL_CALLS]f[ARGS]", "@f{}"),
    ];
    for (format, text, expected) in cases {
        assert_eq!(line(dialect(None, Some(*format)), AnswerStart::Content, text), *expected, "{text:?}");
    }
}

/// A length limit that fell into a call had the server write `{}` or brackets that the model never wrote.
#[test]
fn a_cut_call_has_what_the_model_wrote_and_nothing_else() {
    let cases: &[(ToolFormat, &str, &str)] = &[
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b\"", "@f{\"a\": \"b\""),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [{}", "@f{\"a\": [{}"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}", "@f{\"a\": 1}"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {", "@f{"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a", "@f\"{\\\"a"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", \"id\": \"x", "@f"),
        (ToolFormat::Hermes, "<tool_call>{\"name\": \"f\", ", "@f"),
        (ToolFormat::Llama3Json, "{\"name\": \"f\", \"parameters\": {\"a\": {}", "@f{\"a\": {}"),
        (ToolFormat::Qwen3Coder, "<tool_call><function=f><parameter=n>1</parameter>\n</fun", "@f{\"n\": 1"),
        (ToolFormat::Qwen3Coder, "<tool_call><function=f><parameter=s>Paris\n</param", "@f{\"s\": \"Paris"),
        (ToolFormat::Qwen3Coder, "<tool_call><function=f>\n<parameter=n>\n1", "@f{\"n\": 1"),
        (ToolFormat::Qwen3Coder, "<tool_call><function=f>\n<para", "@f"),
        (ToolFormat::MinimaxM2, "<minimax:tool_call><invoke name=\"f\">\n", "@f"),
        (
            ToolFormat::DeepseekV3,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```js",
            "@f",
        ),
        (ToolFormat::Glm45, "<tool_call>f\n<arg_key>s</arg_key><arg_value>a</arg_value>", "@f{\"s\": \"a\""),
        (ToolFormat::Mistral, "[TOOL_CALLS]f[ARGS]{\"a\": \"b\"", "@f{\"a\": \"b\""),
        (ToolFormat::Mistral, "[TOOL_CALLS]f[ARGS]{\"a\": [", "@f{\"a\": ["),
        (ToolFormat::Mistral, "[TOOL_CALLS]f[ARGS]", "@f"),
    ];
    for (format, text, expected) in cases {
        let said = line_to(AnswerEnd::Cut, dialect(None, Some(*format)), AnswerStart::Content, text);
        assert_eq!(said, *expected, "{text:?}");
    }
}

/// The bracket was held, since it could have opened a marker, and lost when nothing followed.
#[test]
fn a_bracket_at_the_end_of_mistrals_arguments_is_one() {
    let dialect = dialect(None, Some(ToolFormat::Mistral));
    assert_eq!(line(dialect, AnswerStart::Content, "[TOOL_CALLS]f[ARGS]{\"a\": ["), "@f{\"a\": []}");
}

/// Where a quote is missing, everything up to the next one would be the value.
#[test]
fn broken_json_in_tags_ends_at_its_tag() {
    let cases: &[(ToolFormat, &str, &str)] = &[
        (
            ToolFormat::Qwen3Coder,
            "<tool_call><function=f>\n<parameter=o>\n{\"a\": \"b}\n</parameter>\n<parameter=s>\nx\n</parameter></function></tool_call>",
            "@f{\"o\": \"{\\\"a\\\": \\\"b}\", \"s\": \"x\"}",
        ),
        (
            ToolFormat::MinimaxM2,
            "<minimax:tool_call><invoke name=\"f\"><parameter name=\"a\">[\"b]</parameter>\n<parameter name=\"n\">1</parameter></invoke></minimax:tool_call>ok",
            "@f{\"a\": \"[\\\"b]\", \"n\": 1}ok",
        ),
        // Without a line break the end of the answer shows it.
        (
            ToolFormat::Glm45,
            "<tool_call>f<arg_key>o</arg_key><arg_value>{\"a</arg_value></tool_call> ok",
            "@f{\"o\": \"{\\\"a\"} ok",
        ),
        (
            ToolFormat::Glm45,
            "<tool_call>f<arg_key>u</arg_key><arg_value>\"a</arg_value></tool_call>",
            "@f{\"u\": \"\\\"a\"}",
        ),
    ];
    for (format, text, expected) in cases {
        assert_eq!(line(dialect(None, Some(*format)), AnswerStart::Content, text), *expected, "{text:?}");
    }
}

/// Each of these values holds all that follow, up to the line break that shows that none of them is JSON.
#[test]
fn an_answer_is_not_read_again_and_again() {
    let count = 20_000;
    let values = "<parameter=a>[\\\"</parameter>".repeat(count);
    let text = format!("<function=f>{values}\n</function>");
    let mut parser =
        AnswerParser::new(dialect(None, Some(ToolFormat::Qwen3Coder)), AnswerStart::Content, tools());
    let mut parts = Vec::new();
    parser.push(&text, &mut parts);
    parser.finish(AnswerEnd::Whole, &mut parts);
    assert!(parser.reread > text.len(), "{} of {}: nothing was tested", parser.reread, text.len());
    assert!(parser.reread < (1 << 20) + text.len(), "{} of {}", parser.reread, text.len());
    let answer = Answer::of(&parts);
    let arguments: Vec<usize> =
        answer.calls.iter().map(|call| call.2.matches("\"a\": \"[").count()).collect();
    assert_eq!(arguments, [count]);
}

#[test]
fn one_many_none_and_nested_or_escaped_json() {
    let dialect = dialect(None, HERMES);
    for arguments in hard_arguments() {
        let once = written(ToolFormat::Hermes, &[("f", arguments.clone())]);
        for count in [0, 1, 3] {
            let answer = read(dialect, AnswerStart::Content, &[&once.repeat(count)]);
            assert_eq!(answer.values(), vec![("f", arguments.clone()); count]);
            assert_eq!(answer.content, "", "an answer of calls alone has no content");
        }
    }
    let inner = json!({"s": json!({"name": "g", "arguments": {"x": "\"}"}}).to_string()});
    let text = written(ToolFormat::Hermes, &[("f", inner.clone())]);
    assert_eq!(read(dialect, AnswerStart::Content, &[&text]).values(), [("f", inner)]);
}

#[test]
fn without_tools_their_markers_are_content() {
    for format in ToolFormat::ALL {
        let dialect = dialect(None, Some(format));
        let text = written(format, &[("f", json!({"s": "x"}))]);
        let mut parser = AnswerParser::new(dialect, AnswerStart::Content, Arc::new([]));
        let mut parts = Vec::new();
        parser.push(&text, &mut parts);
        parser.finish(AnswerEnd::Whole, &mut parts);
        let answer = Answer::of(&parts);
        assert!(answer.calls.is_empty());
        // Harmony's headers are no text: what a message says is.
        let expected = if format == ToolFormat::Harmony { "{\"s\":\"x\"}" } else { &text };
        assert_eq!(answer.content, expected);
        let mut plain = AnswerParser::plain();
        let mut parts = Vec::new();
        plain.push(&text, &mut parts);
        plain.finish(AnswerEnd::Whole, &mut parts);
        assert_eq!(parts, [AnswerPart::Content(text)]);
    }
}

#[test]
fn names_leave_before_arguments_and_arguments_before_their_end() {
    for format in ToolFormat::ALL {
        let text = written(format, &[("f", json!({"s": "a long text for one parameter"}))]);
        let mut parser = AnswerParser::new(dialect(None, Some(format)), AnswerStart::Content, tools());
        let (mut parts, half) = (Vec::new(), text.find("text").unwrap());
        parser.push(&text[..half], &mut parts);
        let answer = Answer::of(&parts);
        assert_eq!(answer.calls.len(), 1, "{}", format.name());
        assert!(answer.calls[0].2.ends_with("a long "), "{}: {:?}", format.name(), answer.calls);
    }
}

/// Streamed arguments malformed or doubled by braces, other alphabets and text like `{a,b}`: B-85.
#[test]
fn b_85_streamed_arguments_are_the_whole_ones() {
    for format in ToolFormat::ALL {
        let dialect = dialect(None, Some(format));
        for arguments in hard_arguments() {
            let text = written(format, &[("f", arguments.clone()), ("get_weather", arguments.clone())]);
            let whole = read(dialect, AnswerStart::Content, &[&text]);
            assert_eq!(whole.values(), [("f", arguments.clone()), ("get_weather", arguments.clone())]);
            let letters: Vec<String> = text.chars().map(String::from).collect();
            let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
            assert_eq!(read(dialect, AnswerStart::Content, &letters), whole, "{text:?}");
        }
    }
}

/// Reasoning leaks into content where stop strings delay the text: B-86.
#[test]
fn b_86_stop_strings_before_the_parser_leak_no_reasoning() {
    let text = "why not\n</think>\n\nbecause STOP never";
    for stops in [vec!["STOP"], vec!["</answer>", "STOP"], vec!["<", "nothing"]] {
        let mut all = Vec::new();
        for size in 1..8 {
            let mut stop = crate::StopStrings::new(&stops).unwrap();
            let mut parser = AnswerParser::new(dialect(THINK, HERMES), AnswerStart::Reasoning, tools());
            let mut parts = Vec::new();
            let letters: Vec<char> = text.chars().collect();
            for delta in letters.chunks(size) {
                let delta: String = delta.iter().collect();
                parser.push(stop.push(&delta).text, &mut parts);
            }
            parser.push(stop.finish(), &mut parts);
            parser.finish(AnswerEnd::Whole, &mut parts);
            let answer = Answer::of(&parts);
            all.push((answer.reasoning, answer.content));
        }
        let expected = if stops[0] == "<" { ("why not\n", "") } else { ("why not\n", "because ") };
        assert!(all.iter().all(|(r, c)| (r.as_str(), c.as_str()) == expected), "{stops:?} {all:?}");
    }
}

#[test]
fn an_undecided_call_ends_at_the_bound_and_is_text() {
    let text = format!(
        "<tool_call>{{\"arguments\": {{\"s\": \"{}\"}}, \"name\": \"f\"}}",
        "x".repeat(UNDECIDED_BYTES_MAX)
    );
    let answer = read(dialect(None, HERMES), AnswerStart::Content, &[&text]);
    assert_eq!((answer.calls.len(), answer.content.as_str()), (0, text.as_str()));
}

#[test]
fn every_format_is_found_by_its_name() {
    for format in ToolFormat::ALL {
        assert_eq!(ToolFormat::by_name(format.name()), Some(format));
    }
    for format in ReasoningFormat::ALL {
        assert_eq!(ReasoningFormat::by_name(format.name()), Some(format));
    }
    assert_eq!(ToolFormat::by_name("no such parser"), None);
    assert_eq!(ReasoningFormat::by_name("no such parser"), None);
}

#[test]
fn no_marker_begins_another() {
    for dialect in dialects() {
        let sets = MarkerSets::new(dialect.reasoning, dialect.tools);
        for set in [sets.first, sets.content, sets.reasoning] {
            for one in &set {
                assert_eq!(set.iter().filter(|other| other.starts_with(one)).count(), 1, "{dialect:?} {one}");
            }
        }
    }
}
