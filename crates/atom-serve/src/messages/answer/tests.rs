use super::*;
use crate::testing::{Draws, stream, whole};
use atom_text::AnswerPart;

fn shape(thinking: Thinking) -> MessagesShape {
    MessagesShape {
        id: "msg_1".into(),
        model: "tiny".into(),
        stop_sequences: vec!["END".into(), "é".into()],
        fills_context: false,
        blocks: Blocks::new(CallIds::fixed("call_1"), thinking),
        finish: None,
    }
}

const USAGE: Usage = Usage { prompt: 12, cached: 5, generated: 7, reasoning: Some(3) };

/// Puts a stream together as the official client does, and checks its grammar on the way.
fn assemble(events: &[(String, Value)]) -> Value {
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..2], ["message_start", "ping"]);
    assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);
    let mut message = events[0].1["message"].clone();
    assert_eq!(message["content"], json!([]));
    assert_eq!(message["stop_reason"], Value::Null);
    let (mut blocks, mut open, mut input) = (Vec::<Value>::new(), false, String::new());
    for (name, data) in &events[2..events.len() - 2] {
        if name == "content_block_start" {
            assert!(!open, "two blocks are open at {data}");
            assert_eq!(data["index"], blocks.len());
            open = true;
            blocks.push(data["content_block"].clone());
            continue;
        }
        assert!(open, "{data} behind the end of its block");
        assert_eq!(data["index"], blocks.len() - 1);
        let block = blocks.last_mut().unwrap();
        if name == "content_block_stop" {
            open = false;
            assert!(
                block["type"] != "thinking" || block["signature"] != "",
                "a thinking block without signature"
            );
            if block["type"] == "tool_use" {
                assert!(block["id"] != "" && block["name"] != "" && block["id"].is_string(), "{block}");
                // The client's parser is lenient; whatever is cut off is no call.
                block["input"] = serde_json::from_str(&std::mem::take(&mut input)).unwrap_or(json!({}));
            }
            continue;
        }
        assert_eq!(name, "content_block_delta");
        let delta = &data["delta"];
        let (block_kind, field) = match delta["type"].as_str().unwrap() {
            "text_delta" => ("text", "text"),
            "thinking_delta" => ("thinking", "thinking"),
            "signature_delta" => ("thinking", "signature"),
            "input_json_delta" => ("tool_use", "partial_json"),
            other => panic!("delta {other}"),
        };
        assert_eq!(block["type"], block_kind);
        let text = delta[field].as_str().unwrap();
        if field == "partial_json" {
            input.push_str(text);
        } else {
            assert!(field == "signature" || block["signature"].as_str().unwrap_or_default().is_empty());
            block[field] = format!("{}{text}", block[field].as_str().unwrap()).into();
        }
    }
    assert!(!open, "a block was not stopped");
    let end = &events[events.len() - 2].1;
    message["content"] = blocks.into();
    message["stop_reason"] = end["delta"]["stop_reason"].clone();
    message["stop_sequence"] = end["delta"]["stop_sequence"].clone();
    message["usage"] = end["usage"].clone();
    message
}

#[test]
fn any_stream_is_well_formed_and_says_what_the_whole_answer_says() {
    let mut kinds = [0; 3];
    for seed in 0..2000 {
        let mut draws = Draws::new(seed);
        let parts = draws.parts();
        let finish = draws.pick(&[
            Finish::Stop,
            Finish::StopString(0),
            Finish::StopString(1),
            Finish::ToolCalls,
            Finish::Length,
        ]);
        let hides = draws.below(3) == 0;
        let omits = draws.below(4) == 0;
        let thinking = || match (hides, omits) {
            (true, _) => Thinking::Hidden(String::new()),
            (false, true) => Thinking::Omitted,
            (false, false) => Thinking::Shown,
        };
        let expected = shape(thinking()).whole(&[whole(&parts, finish)], &USAGE);
        let pieces = draws.pieces(&parts, finish);
        let found = assemble(&stream(&mut shape(thinking()), &pieces, &USAGE));
        assert_eq!(found, expected, "seed {seed}");
        let content = expected["content"].as_array().unwrap();
        for (count, kind) in kinds.iter_mut().zip(["text", "thinking", "tool_use"]) {
            *count += content.iter().filter(|block| block["type"] == kind).count();
        }
        let said = |kind: &str, field: &str| -> String {
            content
                .iter()
                .filter(|block| block["type"] == kind)
                .map(|block| block[field].as_str().unwrap())
                .collect()
        };
        let texts: String = parts
            .iter()
            .filter_map(|part| match part {
                AnswerPart::Content(text) => Some(text.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(said("text", "text"), texts, "seed {seed}");
    }
    assert!(kinds.iter().all(|&count| count > 500), "every kind of block must come up: {kinds:?}");
}

fn text(text: &str) -> AnswerPart {
    AnswerPart::Content(text.into())
}

fn thought(text: &str) -> AnswerPart {
    AnswerPart::Reasoning(text.into())
}

fn call(index: u32, json: &str) -> Vec<AnswerPart> {
    let mut parts = vec![AnswerPart::Call { index, id: None, name: "look".into() }];
    if !json.is_empty() {
        parts.push(AnswerPart::Arguments { index, json: json.into() });
    }
    parts
}

fn answer(parts: &[AnswerPart], finish: Finish) -> Value {
    shape(Thinking::Shown).whole(&[whole(parts, finish)], &USAGE)
}

fn kinds(message: &Value) -> Vec<&str> {
    message["content"].as_array().unwrap().iter().map(|block| block["type"].as_str().unwrap()).collect()
}

/// ATOM's `test_anthropic_blocks`: nine transitions of kind.
#[test]
fn nine_transitions_between_kinds_lose_nothing() {
    let kind = |at: usize, index: u32| match at {
        0 => vec![text("t")],
        1 => vec![thought("r")],
        _ => call(index, "{}"),
    };
    for first in 0..3 {
        for second in 0..3 {
            let next_call = u32::from(first == 2);
            let parts = [kind(first, 0), kind(second, next_call)].concat();
            let found =
                assemble(&stream(&mut shape(Thinking::Shown), &[whole(&parts, Finish::Stop)], &USAGE));
            let names = ["text", "thinking", "tool_use"];
            // Two stretches of text are one; two calls never are.
            let expected = if first == second && first < 2 {
                vec![names[first]]
            } else {
                vec![names[first], names[second]]
            };
            assert_eq!(kinds(&found), expected);
        }
    }
}

#[test]
fn thinking_comes_before_text_and_calls_and_the_reason_is_tool_use() {
    let parts = [vec![thought("hm"), text("I look.")], call(0, "{\"at\": \"noon\"}")].concat();
    let found = answer(&parts, Finish::ToolCalls);
    assert_eq!(kinds(&found), ["thinking", "text", "tool_use"]);
    assert_eq!(found["stop_reason"], "tool_use");
    assert_eq!(found["content"][2]["input"], json!({"at": "noon"}));
    assert!(found["content"][2]["id"].as_str().unwrap().starts_with("call_1"));
}

#[test]
fn a_name_without_arguments_is_no_reason_to_run_a_tool() {
    assert_eq!(answer(&call(0, ""), Finish::ToolCalls)["stop_reason"], "end_turn");
    assert_eq!(answer(&call(0, "{}"), Finish::ToolCalls)["stop_reason"], "tool_use");
}

#[test]
fn arguments_that_were_cut_off_are_none() {
    let found = answer(&call(0, "{\"path\": \"/"), Finish::Length);
    assert_eq!(found["content"][0]["input"], json!({}));
    assert_eq!(found["stop_reason"], "max_tokens");
}

/// As the API does it: the block is there and signed, and its text is empty.
#[test]
fn omitted_thoughts_are_empty_blocks_that_can_be_sent_back() {
    let parts = [thought("hm"), thought("so"), AnswerPart::Content("text".into())];
    let found = shape(Thinking::Omitted).whole(&[whole(&parts, Finish::Stop)], &USAGE);
    let signature = found["content"][0]["signature"].as_str().unwrap();
    assert!(crate::messages::signature::is_believable(signature, ""), "{signature}");
    assert_eq!(found["content"][0], json!({"type": "thinking", "thinking": "", "signature": signature}));
    assert_eq!(kinds(&found), ["thinking", "text"]);
    let alone = shape(Thinking::Omitted).whole(&[whole(&parts[..2], Finish::Length)], &USAGE);
    assert_eq!(kinds(&alone), ["thinking"]);
}

#[test]
fn an_answer_of_thoughts_alone_is_not_empty_even_when_thoughts_are_hidden() {
    let hidden = |parts: &[AnswerPart]| {
        shape(Thinking::Hidden(String::new())).whole(&[whole(parts, Finish::Length)], &USAGE)
    };
    assert_eq!(kinds(&hidden(&[thought("hm")])), ["thinking"]);
    assert_eq!(hidden(&[thought("hm")])["content"][0]["thinking"], "hm");
    assert_eq!(kinds(&hidden(&[thought("hm"), text("so")])), ["text"]);
    assert_eq!(kinds(&hidden(&[])), Vec::<&str>::new());
}

#[test]
fn closing_twice_says_nothing_the_second_time() {
    let mut shape = shape(Thinking::Shown);
    let mut said = 0;
    let mut emit = |_: u32, _: Event<'_>| said += 1;
    shape.blocks.part(&thought("x"), &mut emit);
    shape.blocks.finish(&mut emit);
    shape.blocks.finish(&mut emit);
    assert_eq!(said, 4, "start, delta, signature, stop");
}

#[test]
fn reasons_usage_and_the_end_of_the_context() {
    let reason = |finish| {
        let found = answer(&[text("x")], finish);
        (found["stop_reason"].as_str().unwrap().to_owned(), found["stop_sequence"].clone())
    };
    assert_eq!(reason(Finish::Stop), ("end_turn".into(), Value::Null));
    assert_eq!(reason(Finish::StopString(1)), ("stop_sequence".into(), "é".into()));
    assert_eq!(reason(Finish::Length), ("max_tokens".into(), Value::Null));
    let mut full = shape(Thinking::Shown);
    full.fills_context = true;
    let full = full.whole(&[whole(&[text("x")], Finish::Length)], &USAGE);
    assert_eq!(full["stop_reason"], "model_context_window_exceeded");
    assert_eq!(
        full["usage"],
        json!({
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 5,
            "output_tokens": 7,
            "output_tokens_details": {"thinking_tokens": 3},
        })
    );
}

#[test]
fn a_failed_stream_ends_with_the_error_event() {
    let mut out = String::new();
    shape(Thinking::Shown).failed(&ApiError::Draining, "req-1", &mut out);
    let [(name, data)] = crate::testing::events(&out).try_into().unwrap();
    assert_eq!(name, "error");
    assert_eq!(data["error"]["type"], "overloaded_error");
    assert_eq!(data["request_id"], "req-1");
    assert!(data["error"]["message"].as_str().unwrap().contains("shutting down"));
}
