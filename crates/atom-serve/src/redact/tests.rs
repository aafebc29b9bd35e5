use super::*;
use proptest::prelude::*;
use serde_json::json;

fn keys() -> ApiKeys {
    ApiKeys::new(["sk-secret"]).unwrap()
}

#[test]
fn texts_names_and_fields_are_looked_at_wherever_they_stand() {
    let mut value = json!({
        "a": ["x sk-secret", {"Password": {"b": 1}, "token": "abc", "secret": null, "is_token": true}],
        "headers": {"authorization": "x", "sk-abcdefgh": 5},
        "max_tokens": 5,
    });
    let expected = json!({
        "a": ["x [redacted]", {"Password": "[redacted]", "token": "[redacted]", "secret": null, "is_token": true}],
        "headers": {"authorization": "[redacted]", "[redacted]": 5},
        "max_tokens": 5,
    });
    assert!(redact(&mut value, &keys()));
    assert_eq!(value, expected);
    assert!(!redact(&mut value, &keys()), "nothing is left");
}

#[test]
fn log_probabilities_spelled_what_was_taken_out_of_the_text() {
    let entry = |token: &str| json!({"token": token, "logprob": -0.5, "top_logprobs": [{"token": "x", "logprob": -1.5}]});
    let mut plain = json!({"logprobs": {"content": [entry("a")], "top_logprobs": [{"password": -1.5}]}});
    let before = plain.clone();
    assert!(!redact(&mut plain, &keys()), "tokens are no secrets");
    assert_eq!(plain, before);
    let mut spelled = json!({"choices": [{"logprobs": {"content": [entry("sk-"), entry("secret")]}}],
        "request": {"logprobs": true, "tokens": [1, 2]}, "token_strs": ["a"]});
    assert!(redact_spelled(&mut spelled));
    let expected = json!({"choices": [{"logprobs": REDACTED}],
        "request": {"logprobs": true, "tokens": REDACTED}, "token_strs": REDACTED});
    assert_eq!(spelled, expected);
    let event = |text: &str| json!({"choices": [{"index": 0, "text": text, "logprobs": {"tokens": [text]}}]});
    let stream = format!("data: {}\n\ndata: {}\n\n", event("sk-"), event("secret"));
    let (shown, any) = redact_stream(&stream, &keys(), false);
    assert!(any && !shown.contains("sk-") && !shown.contains("secret"), "{shown}");
    let stream = format!("data: {}\n\n", event("x"));
    assert_eq!(redact_stream(&stream, &keys(), false), (stream.clone(), false));
    let (shown, any) = redact_stream(&stream, &keys(), true);
    assert!(!any && shown.contains(r#""logprobs":"[redacted]""#), "{shown}");
}

/// Every text in a stream, by choice and field, put together.
fn told(stream: &str) -> Vec<String> {
    let (mut names, mut channels) = (Names::default(), HashMap::<u32, String>::new());
    let mut each = |name, text: &mut String| channels.entry(name).or_default().push_str(text);
    for line in stream.lines() {
        if let Some(mut event) = line.strip_prefix(DATA).and_then(|data| serde_json::from_str(data).ok()) {
            Walk { names: &mut names, each: &mut each }.walk(&mut event, TOP);
        }
    }
    channels.into_values().collect()
}

#[test]
fn a_key_that_is_split_over_events_is_taken_out_wherever_it_is_cut() {
    let chat = |index: u32, delta: Value| json!({"choices": [{"index": index, "delta": delta}]});
    let call = |index: u32, json: &str| {
        chat(0, json!({"tool_calls": [{"index": index, "function": {"arguments": json}}]}))
    };
    let text = "my key is sk-secret, é, Bearer abcdefgh123 too";
    let arguments = r#"{"n": 1, "api_key": "hunter2hunter2", "q": "x"}"#;
    for width in 1..12 {
        let cut = |text: &str| -> Vec<String> {
            let chars: Vec<char> = text.chars().collect();
            chars.chunks(width).map(|part| part.iter().collect()).collect()
        };
        let mut stream = ": a comment\n\n".to_owned();
        for part in cut(text) {
            // Two choices and two calls in turn, and the shapes of other APIs.
            for event in [
                chat(0, json!({"content": part})),
                chat(1, json!({"content": part})),
                json!({"type": "content_block_delta", "index": 2, "delta": {"type": "text_delta", "text": part}}),
                json!({"type": "response.output_text.delta", "output_index": 1, "content_index": 0, "delta": part}),
                json!({"choices": [{"index": 0, "text": part}]}),
            ] {
                stream.push_str(&format!("data: {event}\n\n"));
            }
        }
        for part in cut(arguments) {
            for index in [0, 1] {
                stream.push_str(&format!("data: {}\n\n", call(index, &part)));
            }
        }
        stream.push_str("data: [DONE]\n\n");
        let (shown, any) = redact_stream(&stream, &keys(), false);
        assert!(any);
        let texts = told(&shown);
        for secret in ["sk-secret", "abcdefgh123", "hunter2"] {
            assert!(!texts.iter().any(|text| text.contains(secret)), "{width}: {secret} in {texts:?}");
        }
        let expected = "my key is [redacted], é, Bearer [redacted] too";
        assert_eq!(texts.iter().filter(|text| *text == expected).count(), 5, "{width}: {texts:?}");
        let expected = r#"{"n": 1, "api_key": "[redacted]", "q": "x"}"#;
        assert_eq!(texts.iter().filter(|text| *text == expected).count(), 2, "{width}: {texts:?}");
        assert!(shown.starts_with(": a comment\n\ndata: ") && shown.ends_with("data: [DONE]\n\n"));
    }
}

#[test]
fn a_stream_without_secrets_is_written_as_it_was_sent() {
    let stream = "event: x\ndata: {\"b\":1,  \"a\":\"text\"}\n\n: still here\n\ndata: [DONE]\n\n";
    assert_eq!(redact_stream(stream, &keys(), false), (stream.to_owned(), false));
}

#[test]
fn a_long_name_above_many_texts_is_not_kept_for_each() {
    // With a copy of the place for each text, these would be 100 GB.
    let event = json!({"n".repeat(400 << 10): vec!["sk-a1b2c3"; 50 << 10]});
    let (shown, any) = redact_stream(&format!("data: {event}\n\n"), &keys(), false);
    assert!(any && !shown.contains("sk-"));
}

/// What texts are made of in which secrets are looked for.
fn text() -> impl Strategy<Value = String> {
    let parts = [
        "sk-",
        "sk-secret",
        "hf_",
        "AKIA",
        "Bearer ",
        "Authorization",
        "token",
        "api_key",
        "password",
        ": ",
        ":",
        "=",
        "&",
        "\"",
        "'",
        "\\",
        "\\\"",
        "\n",
        "{",
        "}",
        "[",
        "]",
        ",",
        " ",
        "null",
        "://",
        "u:p",
        "@",
        "-----BEGIN ",
        "KEY",
        "-----",
        "-----END ",
        "é",
        "🦀",
        "a1b2c3d4e5f6g7h8",
        "abc",
    ];
    prop::collection::vec(prop::sample::select(parts.to_vec()), 0..40).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn what_a_stream_says_is_the_same_however_it_is_cut(
        text in text(),
        cuts in prop::collection::vec(0_usize..400, 0..60),
        others in any::<bool>(),
    ) {
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|&cut| text.is_char_boundary(cut.min(text.len()))).collect();
        cuts.extend([0, text.len()]);
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
        cuts.sort_unstable();
        let mut stream = String::new();
        for cut in cuts.windows(2) {
            let event = |index: u32, part: &str| json!({"choices": [{"index": index, "delta": {"content": part}}]});
            stream.push_str(&format!("data: {}\n\n", event(0, &text[cut[0]..cut[1]])));
            if others {
                stream.push_str(&format!("data: {}\n\n", event(1, "x")));
            }
        }
        let mut whole = json!(text);
        redact(&mut whole, &keys());
        let (shown, _) = redact_stream(&stream, &keys(), false);
        let texts = told(&shown);
        prop_assert!(texts.iter().any(|text| *text == whole), "{whole} is none of {texts:?}");
        prop_assert!(!texts.iter().any(|text| text.contains("sk-secret")));
    }
}
