//! Tokens without a model: `/tokenize`, `/detokenize`, `/render`.

use crate::fake::{BOS, IM_END, IM_START, Site, TEMPLATE, bytes, says, tool_model};
use serde_json::{Value, json};

fn chat(content: &str) -> Value {
    json!({"messages": [{"role": "user", "content": content}]})
}

/// `value` with the fields of `more`.
fn with(mut value: Value, more: &Value) -> Value {
    value.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    value
}

#[tokio::test]
async fn text_becomes_tokens_and_tokens_text() {
    let site = Site::start(says("ok")).await;
    let answer = site.post("/tokenize", &json!({"prompt": "é<|im_end|>"})).await;
    let tokens = json!([BOS, 0xC3, 0xA9, IM_END]);
    let expected = json!({"count": 4, "max_model_len": 900, "tokens": tokens, "token_strs": null});
    assert_eq!((answer.status, answer.json()), (200, expected));

    let asked =
        json!({"prompt": "é a", "add_special_tokens": false, "return_token_strs": true, "model": "tiny"});
    let answer = site.post("/tokenize", &asked).await.json();
    assert_eq!(answer["tokens"], json!([0xC3, 0xA9, 32, 97]));
    assert_eq!(answer["token_strs"], json!(["Ã", "©", "Ġ", "a"]));

    let answer = site.post("/detokenize", &json!({"tokens": tokens, "model": "org/tiny-1"})).await;
    assert_eq!((answer.status, answer.json()), (200, json!({"prompt": "<s>é<|im_end|>"})));
    assert_eq!(site.post("/detokenize", &json!({"tokens": []})).await.json(), json!({"prompt": ""}));
    assert_eq!(site.fake.taken_now(), 0);
}

/// Whatever a conversation's tokens are asked by, they are those that the model gets.
#[tokio::test]
async fn rendered_tokens_are_the_ones_that_the_model_gets() {
    let site = Site::start(says("ok")).await;
    let long = "again and again ".repeat(40);
    let bodies = [
        chat("hi"),
        chat(&long),
        // Once more, now that its tokens are kept.
        chat(&long),
        with(chat("hi"), &json!({"add_generation_prompt": false})),
        with(chat("hi"), &json!({"chat_template_kwargs": {"hint": "so:"}})),
    ];
    for (at, body) in bodies.iter().enumerate() {
        let tokenized = site.post("/tokenize", body).await.json();
        let rendered = site.post("/v1/chat/completions/render", &with(body.clone(), &json!({"n": 2}))).await;
        assert_eq!(site.post("/v1/chat/completions", body).await.status, 200);
        let prompt = json!(*site.fake.request(at).prompt);
        assert_eq!((&tokenized["tokens"], &rendered.json()["token_ids"]), (&prompt, &prompt), "{body}");
        assert_eq!(tokenized["count"], prompt.as_array().unwrap().len());
    }
    let first =
        [&[IM_START][..], &bytes("user\nhi"), &[IM_END], &bytes("\n"), &[IM_START], &bytes("assistant\n")];
    assert_eq!(*site.fake.request(0).prompt, first.concat());
}

#[tokio::test]
async fn tools_are_part_of_the_prompt_however_its_tokens_are_asked_for() {
    let site = Site::start_model(says("ok"), tool_model(), |_| {}).await;
    let function = json!({"name": "look_up", "parameters": {"type": "object", "properties": {}}});
    let tools = json!([{"type": "function", "function": function}]);
    for more in [json!({"tools": tools}), json!({"tools": tools, "tool_choice": "none"}), json!({})] {
        let body = with(chat("hi"), &more);
        let tokenized = site.post("/tokenize", &body).await.json();
        let rendered = site.post("/v1/chat/completions/render", &body).await.json();
        let before = site.fake.taken_now();
        assert_eq!(site.post("/v1/chat/completions", &body).await.status, 200, "{body}");
        let prompt = json!(*site.fake.request(before).prompt);
        assert_eq!((&tokenized["tokens"], &rendered["token_ids"]), (&prompt, &prompt), "{body}");
    }
    assert_ne!(site.fake.request(0).prompt, site.fake.request(2).prompt);
}

#[tokio::test]
async fn every_prompt_of_a_completion_is_rendered() {
    let site = Site::start(says("ok")).await;
    let body = json!({"prompt": ["a", "bc"], "max_tokens": 5, "n": 3, "stream": true});
    let rendered = site.post("/v1/completions/render", &body).await.json();
    let list = rendered.as_array().unwrap();
    assert_eq!(list.len(), 2);
    assert_eq!((&list[0]["token_ids"], &list[1]["token_ids"]), (&json!([BOS, 97]), &json!([BOS, 98, 99])));
    assert_eq!((&list[0]["max_tokens"], &list[0]["model"]), (&json!(5), &json!("tiny")));
    assert_ne!(list[0]["request_id"], list[1]["request_id"]);
    // A token list goes through as it is.
    let body = json!({"prompt": [1, 2, 3]});
    assert_eq!(site.post("/v1/completions/render", &body).await.json()[0]["token_ids"], json!([1, 2, 3]));
    assert_eq!(site.fake.taken_now(), 0);
}

/// A router got the tokens of a request that no server would generate from.
#[tokio::test]
async fn what_generation_refuses_for_its_length_is_not_rendered() {
    let site = Site::start(says("ok")).await;
    // A context of 1000, a cache of 900.
    let plain =
        |tokens: usize, more: Value| with(json!({"prompt": vec![97; tokens], "max_tokens": 10}), &more);
    let long = chat(&"a".repeat(1000));
    let cases = [
        ("/v1/completions", plain(995, json!({}))),
        ("/v1/completions", plain(895, json!({}))),
        ("/v1/completions", plain(5, json!({"prompt": ["a", ""], "data_parallel_rank": 7}))),
        ("/v1/completions", plain(5, json!({"n": 128}))),
        ("/v1/completions", plain(5, json!({"guided_regex": "(a"}))),
        ("/v1/chat/completions", long.clone()),
        ("/v1/chat/completions", with(long, &json!({"max_tokens": 1}))),
        ("/v1/chat/completions", with(chat("hi"), &json!({"max_tokens": 990}))),
        ("/v1/chat/completions", with(chat("hi"), &json!({"max_tokens": u32::MAX}))),
        ("/v1/chat/completions", with(chat("hi"), &json!({"data_parallel_rank": 7}))),
    ];
    for (path, body) in cases {
        let generated = site.post(path, &body).await;
        let rendered = site.post(&format!("{path}/render"), &body).await;
        assert_eq!((generated.status, rendered.status), (400, 400), "{path} {}", rendered.text());
        assert_eq!(rendered.error(), generated.error());
    }
    assert_eq!(site.post("/v1/completions/render", &plain(890, json!({}))).await.status, 200);
    assert_eq!(site.fake.taken_now(), 0);
}

#[tokio::test]
async fn bad_bodies_are_refused_by_name_and_do_no_harm() {
    let site = Site::start(says("ok")).await;
    let cases = [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": 7}), "prompt"),
        ("/tokenize", json!({"prompt": ["a"]}), "prompt"),
        ("/tokenize", with(chat("hi"), &json!({"prompt": "a"})), "messages"),
        ("/tokenize", json!({"prompt": "a", "add_special_tokens": 1}), "add_special_tokens"),
        ("/tokenize", with(chat("hi"), &json!({"add_special_tokens": true})), "add_special_tokens"),
        ("/tokenize", json!({"prompt": "a", "temperature": 1}), "temperature"),
        ("/tokenize", with(chat("hi"), &json!({"temperature": 1})), "temperature"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": "abc"}), "tokens"),
        ("/detokenize", json!({"tokens": [1, -1]}), "tokens[1]"),
        ("/detokenize", json!({"tokens": [264]}), "tokens[0]"),
        ("/detokenize", json!({"tokens": [[1]]}), "tokens[0]"),
        ("/detokenize", json!({"tokens": [], "skip": true}), "skip"),
        ("/v1/chat/completions/render", json!({"prompt": "a"}), "messages"),
        ("/v1/completions/render", json!({"prompt": []}), "prompt"),
    ];
    for (path, body, param) in cases {
        let response = site.post(path, &body).await;
        assert_eq!(response.status, 400, "{path} {body}");
        let error = response.error();
        let names_it = error["message"].as_str().unwrap().contains(&format!("'{param}"));
        assert!(error["param"] == param && names_it, "{path} {body}: {error}");
    }
    let elsewhere = json!({"prompt": "a", "model": "other"});
    assert_eq!(site.post("/tokenize", &elsewhere).await.status, 404);
    let mut client = site.client().await;
    client.send("POST", "/tokenize", &[("content-type", "text/plain")], b"{}").await;
    assert_eq!(client.response().await.status, 415);
    assert_eq!(site.get("/tokenize").await.status, 405);
    assert_eq!(site.post("/tokenize", &json!({"prompt": "a"})).await.status, 200);
}

/// lm-eval counts by the server's tokenizer if it is told this much, and asks the hub for one if it is not.
#[tokio::test]
async fn a_client_can_ask_for_special_tokens_and_the_template() {
    let site = Site::start(says("ok")).await;
    let answer = site.get("/tokenizer_info").await;
    let mut info = answer.json();
    let template = info.as_object_mut().unwrap().remove("chat_template").unwrap();
    let expected = json!({
        "bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": null, "pad_token": null,
        "add_bos_token": true, "model_max_length": 900,
    });
    assert_eq!((answer.status, info), (200, expected));
    assert_eq!(template, json!(TEMPLATE));
    for name in ["bos_token", "eos_token"] {
        let text = &answer.json()[name];
        let tokens =
            site.post("/tokenize", &json!({"prompt": text, "add_special_tokens": false})).await.json();
        assert_eq!(tokens["count"], 1, "{name} is one token");
    }
}

/// Agents send their conversation again and again; the counts say that it was known.
#[tokio::test]
async fn a_conversation_that_grows_is_known_by_its_beginning() {
    let site = Site::start_with(says("ok"), |options| options.debug = true).await;
    let said = "something of some length, so that it is worth keeping, over and over ".repeat(2);
    let mut messages = Vec::new();
    for turn in 0..5 {
        messages.push(json!({"role": "user", "content": format!("{said}{turn}")}));
        let body = json!({"messages": messages, "max_tokens": 1});
        assert_eq!(site.post("/v1/chat/completions", &body).await.status, 200, "turn {turn}");
    }
    let stats = site.get("/debug/cache_stats").await.json();
    assert_eq!((&stats["token_cache"]["misses"], &stats["token_cache"]["hits"]), (&json!(5), &json!(10)));
    let metrics = site.get("/metrics").await;
    for line in ["atom_token_cache_hits_total 10", "atom_token_cache_misses_total 5"] {
        assert!(metrics.text().lines().any(|found| found == line), "{}", metrics.text());
    }
}
