use super::super::tools::Spelling;
use super::*;
use crate::testing::{Draws, events, stream, whole};
use atom_text::AnswerPart;

fn shape() -> ResponsesShape {
    let request = Map::from_iter([("store".to_owned(), json!(false))]);
    let spelling = |namespace: Option<&str>, name: &str, is_custom| Spelling {
        namespace: namespace.map(str::to_owned),
        name: name.into(),
        is_custom,
    };
    let spellings = Spellings::from_iter([
        ("f1".to_owned(), spelling(None, "patch", true)),
        ("f2".to_owned(), spelling(Some("agents"), "spawn", false)),
    ]);
    let items = Items::new("resp_1".into(), CallIds::fixed("call_1"), spellings);
    ResponsesShape {
        id: "resp_1".into(),
        created_s: 1,
        request,
        items,
        finish: None,
        events: Events::default(),
    }
}

const USAGE: Usage = Usage { prompt: 12, cached: 5, generated: 7, reasoning: Some(3) };

/// Puts a stream together from its deltas alone, and checks its grammar on the way: the response that ends
/// it must be the same.
fn assemble(events: &[(String, Value)]) -> Value {
    for (at, (_, data)) in events.iter().enumerate() {
        assert_eq!(data["sequence_number"], at, "{data}");
    }
    let [(created, begin), (in_progress, _), items @ .., (_, end)] = events else { panic!("{events:?}") };
    assert_eq!([created.as_str(), in_progress], ["response.created", "response.in_progress"]);
    assert_eq!(begin["response"]["output"], json!([]));
    assert_eq!(begin["response"]["status"], "in_progress");
    let mut output = Vec::<Value>::new();
    let mut at = 0;
    while at < items.len() {
        let (item, next) = assemble_item(&items[at..], output.len());
        output.push(item);
        at += next;
    }
    let mut response = end["response"].clone();
    assert_eq!(response["output"], Value::from(output.clone()));
    response["output"] = output.into();
    response
}

/// The item at the front, and how many events it has.
fn assemble_item(events: &[(String, Value)], index: usize) -> (Value, usize) {
    let (name, added) = &events[0];
    assert_eq!(name, "response.output_item.added");
    assert_eq!(added["output_index"], index);
    let item = &added["item"];
    assert_eq!(item["status"], "in_progress");
    let (stem, part, field) = match item["type"].as_str().unwrap() {
        "message" => ("output_text", true, "text"),
        "reasoning" => ("reasoning_text", true, "text"),
        "function_call" => ("function_call_arguments", false, "arguments"),
        "custom_tool_call" => ("custom_tool_call_input", false, "input"),
        other => panic!("item {other}"),
    };
    let mut text = String::new();
    let mut at = 1;
    let mut next = |name: &str| {
        let (found, data) = &events[at];
        let fits = found == name;
        if fits {
            at += 1;
            assert_eq!(data["output_index"], index);
            if name != "response.output_item.done" {
                assert_eq!(data["item_id"], item["id"]);
            }
        }
        fits.then_some(data)
    };
    if part {
        let data = next("response.content_part.added").unwrap();
        assert_eq!((data["content_index"].as_u64(), &data["part"]["text"]), (Some(0), &json!("")));
    }
    while let Some(data) = next(&format!("response.{stem}.delta")) {
        text.push_str(data["delta"].as_str().unwrap());
    }
    assert_eq!(next(&format!("response.{stem}.done")).unwrap()[field], text.as_str());
    if part {
        assert_eq!(next("response.content_part.done").unwrap()["part"]["text"], text.as_str());
    }
    let done = next("response.output_item.done").unwrap()["item"].clone();
    let said = if part { &done["content"][0]["text"] } else { &done[field] };
    assert_eq!((said, &done["id"]), (&json!(text), &item["id"]));
    (done, at)
}

#[test]
fn any_stream_is_well_formed_and_says_what_the_whole_answer_says() {
    let mut kinds = [0; 4];
    for seed in 0..2000 {
        let mut draws = Draws::new(seed);
        let parts = draws.parts();
        let finish = draws.pick(&[Finish::Stop, Finish::StopString(0), Finish::ToolCalls, Finish::Length]);
        let expected = shape().whole(&[whole(&parts, finish)], &USAGE);
        let pieces = draws.pieces(&parts, finish);
        assert_eq!(assemble(&stream(&mut shape(), &pieces, &USAGE)), expected, "seed {seed}");
        let output = expected["output"].as_array().unwrap();
        for (count, kind) in
            kinds.iter_mut().zip(["message", "reasoning", "function_call", "custom_tool_call"])
        {
            *count += output.iter().filter(|item| item["type"] == kind).count();
        }
        for item in output {
            let spawns = item["namespace"] == "agents";
            assert_eq!(spawns, item["name"] == "spawn", "{item}");
        }
        let ids: std::collections::HashSet<_> = output.iter().map(|item| item["id"].to_string()).collect();
        assert_eq!(ids.len(), output.len());
    }
    assert!(kinds.iter().all(|&count| count > 300), "every kind of item must come up: {kinds:?}");
}

#[test]
fn an_answer_that_was_cut_is_incomplete_and_says_why() {
    let parts = [AnswerPart::Reasoning("hm".into()), AnswerPart::Content("so".into())];
    let found = shape().whole(&[whole(&parts, Finish::Length)], &USAGE);
    assert_eq!(found["status"], "incomplete");
    assert_eq!(found["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(
        (&found["output"][0]["status"], &found["output"][1]["status"]),
        (&json!("completed"), &json!("incomplete"))
    );
    let events = stream(&mut shape(), &[whole(&parts, Finish::Length)], &USAGE);
    assert_eq!(events.last().unwrap().0, "response.incomplete");
    assert_eq!(
        found["usage"],
        json!({
            "input_tokens": 12,
            "input_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 0},
            "output_tokens": 7,
            "output_tokens_details": {"reasoning_tokens": 3},
            "total_tokens": 19,
        })
    );
}

#[test]
fn a_stream_that_fails_begins_nevertheless_and_ends_with_the_failure() {
    let mut out = String::new();
    shape().failed(&ApiError::Draining, "req-1", &mut out);
    let events = events(&out);
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["response.created", "response.in_progress", "response.failed"]);
    let response = &events[2].1["response"];
    assert_eq!(response["status"], "failed");
    assert_eq!(response["error"]["code"], "server_error");
}
