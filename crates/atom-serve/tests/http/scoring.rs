//! Log-probabilities, of what is generated and of the prompt.

use crate::fake::{BOS, IM_END, Site, answer, bytes, says};
use serde_json::{Value, json};

/// What the fake engine says of a token.
fn worth(token: u32) -> Value {
    json!(f64::from(-(token as f32) / 64.0))
}

#[tokio::test]
async fn chat_entries_have_the_token_its_bytes_and_the_alternatives() {
    let site = Site::start(says("aé")).await;
    let body = json!({
        "messages": [{"role": "user", "content": "x"}], "logprobs": true, "top_logprobs": 2,
    });
    let whole = site.post("/v1/chat/completions", &body).await.json();
    let entry = |token: &str, id: u32| json!({"token": token, "logprob": worth(id), "bytes": [id]});
    let with_top = |token: &str, id: u32, top: [Value; 2]| {
        let mut entry = entry(token, id);
        entry["top_logprobs"] = json!(top);
        entry
    };
    assert_eq!(
        whole["choices"][0]["logprobs"]["content"],
        json!([
            with_top("a", 97, [entry("`", 96), entry("a", 97)]),
            with_top("bytes:\\xc3", 0xC3, [entry("bytes:\\xc2", 0xC2), entry("bytes:\\xc3", 0xC3)]),
            with_top("bytes:\\xa9", 0xA9, [entry("bytes:\\xa8", 0xA8), entry("bytes:\\xa9", 0xA9)]),
        ])
    );
    assert_eq!(site.fake.request(0).sampling.logprobs, Some(2));

    let body = json!({"messages": [{"role": "user", "content": "x"}], "logprobs": true});
    let whole = site.post("/v1/chat/completions", &body).await.json();
    assert_eq!(whole["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
    let body = json!({"messages": [{"role": "user", "content": "x"}], "logprobs": false, "top_logprobs": 0});
    let whole = site.post("/v1/chat/completions", &body).await.json();
    assert_eq!(whole["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn echo_scores_the_prompt_and_begins_with_null() {
    let site = Site::start(says("b")).await;
    let body = json!({"prompt": "aé", "echo": true, "logprobs": 1, "max_tokens": 1});
    let whole = site.post("/v1/completions", &body).await.json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["text"], "aéb");
    assert_eq!(
        choice["logprobs"],
        json!({
            "tokens": ["<s>", "a", "bytes:\\xc3", "bytes:\\xa9", "b"],
            "token_logprobs": [null, worth(97), worth(0xC3), worth(0xA9), worth(98)],
            // One alternative was asked for; the token itself is always there too.
            "top_logprobs": [
                null,
                {"`": worth(96), "a": worth(97)},
                {"bytes:\\xc2": worth(0xC2), "bytes:\\xc3": worth(0xC3)},
                {"bytes:\\xa8": worth(0xA8), "bytes:\\xa9": worth(0xA9)},
                {"a": worth(97), "b": worth(98)},
            ],
            // Characters; the BOS that the tokenizer added isn't shown and takes no room.
            "text_offset": [0, 0, 1, 1, 2],
        })
    );
    assert_eq!(whole["usage"]["prompt_tokens"], 4);
}

#[tokio::test]
async fn scoring_without_generating_returns_the_prompts_entries_alone() {
    let site = Site::start(says("never")).await;
    let body = json!({"prompt": [[97, 98], [BOS, 99]], "echo": true, "logprobs": 0, "max_tokens": 0});
    let whole = site.post("/v1/completions", &body).await.json();
    let choice = |at: usize| whole["choices"][at].clone();
    assert_eq!(choice(0)["text"], "ab");
    assert_eq!(choice(0)["logprobs"]["token_logprobs"], json!([null, worth(98)]));
    assert_eq!(choice(0)["logprobs"]["top_logprobs"], json!([null, {"b": worth(98)}]));
    assert_eq!(choice(0)["finish_reason"], "length");
    assert_eq!(choice(1)["text"], "<s>c", "tokens are shown as they were sent");
    assert_eq!(choice(1)["logprobs"]["text_offset"], json!([0, 3]));
    assert_eq!(whole["usage"]["completion_tokens"], 0);
}

/// Evaluation tools ask for one token and drop the last entry of the list.
#[tokio::test]
async fn a_scored_prompt_is_followed_by_one_entry_even_if_the_model_ends_there() {
    let site = Site::start(|request| answer(request, &[IM_END])).await;
    let body = json!({"prompt": [97, 98], "echo": true, "logprobs": 1, "max_tokens": 1});
    let whole = site.post("/v1/completions", &body).await.json();
    let logprobs = &whole["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["a", "b", "<|im_end|>"]));
    assert_eq!(logprobs["token_logprobs"], json!([null, worth(98), worth(IM_END)]));
    assert_eq!(whole["choices"][0]["text"], "ab");
    assert!(site.fake.request(0).stop.ignore_eos);

    let body = json!({"prompt": [97, 98], "echo": true, "logprobs": 1, "max_tokens": 2});
    site.post("/v1/completions", &body).await;
    assert!(!site.fake.request(1).stop.ignore_eos, "a continuation ends where the model ends it");
}

#[tokio::test]
async fn echo_without_logprobs_scores_nothing_and_logprobs_without_echo_only_the_continuation() {
    let site = Site::start(says("bc")).await;
    let whole = site.post("/v1/completions", &json!({"prompt": "a", "echo": true})).await.json();
    assert_eq!(
        (&whole["choices"][0]["text"], &whole["choices"][0]["logprobs"]),
        (&json!("abc"), &Value::Null)
    );
    assert_eq!(site.fake.request(0).sampling.prompt_logprobs, None);
    let whole = site.post("/v1/completions", &json!({"prompt": "a", "logprobs": 0})).await.json();
    assert_eq!(
        whole["choices"][0]["logprobs"],
        json!({
            "tokens": ["b", "c"],
            "token_logprobs": [worth(98), worth(99)],
            "top_logprobs": [{"b": worth(98)}, {"c": worth(99)}],
            "text_offset": [0, 1],
        })
    );
}

#[tokio::test]
async fn a_token_that_the_model_rules_out_has_a_finite_logprob() {
    let site = Site::start(|request| {
        let mut plays = answer(request, &bytes("a"));
        for play in &mut plays {
            if let crate::fake::Play::Say(atom_engine::Event::Token(scored)) = play {
                scored.logprob = f32::NEG_INFINITY;
            }
        }
        plays
    })
    .await;
    let whole = site.post("/v1/completions", &json!({"prompt": "a", "logprobs": 0})).await.json();
    assert_eq!(whole["choices"][0]["logprobs"]["token_logprobs"], json!([-9999.0]));
}
