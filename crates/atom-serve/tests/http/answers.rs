//! Whole answers, and what reaches the engine.

use crate::fake::{BOS, IM_END, IM_START, Site, answer, bytes, says, text_model};
use atom_base::{LaneId, SamplingParams};
use serde_json::{Value, json};
use std::collections::HashSet;

fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_chat_is_answered_in_the_shape_of_the_api() {
    let site = Site::start(says("Grüße!")).await;
    let response = site.post("/v1/chat/completions", &chat(json!({}))).await;
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("content-type"), Some("application/json"));
    let answer = response.json();
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "tiny");
    assert!(answer["created"].as_u64().unwrap() > 1_600_000_000);
    assert_eq!(
        answer["choices"],
        json!([{
            "index": 0,
            "message": {"role": "assistant", "content": "Grüße!"},
            "logprobs": null,
            "finish_reason": "stop",
        }])
    );
    let prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n".len() - 2 * 11 - 9;
    assert_eq!(
        answer["usage"],
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": 8,
            "total_tokens": prompt + 8,
            "prompt_tokens_details": {"cached_tokens": 3},
        })
    );
}

#[tokio::test]
async fn messages_go_through_the_template_and_into_the_engine_as_tokens() {
    let site = Site::start(says("ok")).await;
    let body = json!({
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "tool_calls": [], "refusal": null},
            {"role": "user", "content": ""},
        ],
        "chat_template_kwargs": {"hint": "Well, "},
    });
    assert_eq!(site.post("/v1/chat/completions", &body).await.status, 200);
    let rendered = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user=ann\na\nb<|im_end|>\n\
                    <|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\nWell, ";
    let request = site.fake.request(0);
    assert_eq!(text_model().tokenizer.decode(&request.prompt, false), rendered);
    assert_eq!(request.prompt[0], IM_START);
    // The default is what is left: the smaller of context (1000) and cache (900).
    assert_eq!(request.stop.max_tokens as usize, 900 - request.prompt.len());

    let open = chat(json!({"add_generation_prompt": false, "max_tokens": 5}));
    assert_eq!(site.post("/v1/chat/completions", &open).await.status, 200);
    assert_eq!(
        text_model().tokenizer.decode(&site.fake.request(1).prompt, false),
        "<|im_start|>user\nhi<|im_end|>\n"
    );
}

#[tokio::test]
async fn every_field_that_acts_reaches_the_engine() {
    let site = Site::start(says("ok")).await;
    let fields = json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": -2,
        "presence_penalty": 0.25, "frequency_penalty": -0.5, "repetition_penalty": 1.5,
        "logit_bias": {"65": -100, "66": 2.5}, "stop_token_ids": [10, 257], "ignore_eos": true,
        "max_tokens": 4, "max_completion_tokens": 6, "data_parallel_rank": 1,
        "user": "u", "metadata": {"k": "v"}, "store": false, "service_tier": "auto", "best_of": 1,
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
    });
    let expected = SamplingParams {
        temperature: 0.5,
        top_p: 0.9,
        top_k: 40,
        min_p: 0.05,
        seed: u64::MAX - 1,
        choice: 0,
        presence_penalty: 0.25,
        frequency_penalty: -0.5,
        repetition_penalty: 1.5,
        logit_bias: Box::new([(65, -100.0), (66, 2.5)]),
        logprobs: None,
        prompt_logprobs: None,
    };
    let mut plain = json!({"prompt": "a"});
    plain.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let bodies = [("/v1/chat/completions", chat(fields)), ("/v1/completions", plain)];
    for (at, (path, body)) in bodies.iter().enumerate() {
        let response = site.post(path, body).await;
        assert_eq!(response.status, 200, "{}", response.text());
        let request = site.fake.request(at);
        assert_eq!(*request.sampling, expected);
        assert_eq!(request.stop.max_tokens, 6);
        assert_eq!(*request.stop.stop_token_ids, [10, 257]);
        assert!(request.stop.ignore_eos);
        assert_eq!(request.lane, Some(LaneId(1)));
    }
}

#[tokio::test]
async fn fields_left_out_have_the_servers_defaults_and_null_is_left_out() {
    let site = Site::start_with(says("ok"), |options| {
        options.defaults.temperature = 0.75;
        options.defaults.top_k = 20;
    })
    .await;
    let nulls =
        json!({"temperature": null, "top_k": null, "n": null, "stop": null, "tools": null, "nonsense": null});
    for extra in [json!({}), nulls] {
        assert_eq!(site.post("/v1/chat/completions", &chat(extra)).await.status, 200);
    }
    assert_eq!(site.post("/v1/chat/completions", &chat(json!({"top_k": -1}))).await.status, 200);
    assert_eq!(site.post("/v1/completions", &json!({"prompt": "a"})).await.status, 200);
    let seen: Vec<_> = (0..4).map(|at| site.fake.request(at)).collect();
    assert_eq!(seen[0].sampling.temperature, 0.75);
    assert_eq!((seen[0].sampling.top_k, seen[1].sampling.top_k, seen[2].sampling.top_k), (20, 20, 0));
    assert_eq!(seen[3].stop.max_tokens, 16, "a plain completion's default");
    let seeds: HashSet<u64> = seen.iter().map(|request| request.sampling.seed).collect();
    assert_eq!(seeds.len(), 4, "each request draws its own seed");
}

#[tokio::test]
async fn choices_share_the_prompt_and_the_seed_and_their_tokens_are_summed() {
    let site = Site::start(|request| {
        let text = ["one", "three", "x"][request.sampling.choice as usize];
        answer(request, &bytes(text))
    })
    .await;
    let whole = site.post("/v1/chat/completions", &chat(json!({"n": 3, "max_tokens": 4}))).await.json();
    let choices: Vec<_> = whole["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| {
            (
                c["index"].as_u64().unwrap(),
                c["message"]["content"].as_str().unwrap(),
                c["finish_reason"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(choices, [(0, "one", "stop"), (1, "thre", "length"), (2, "x", "stop")]);
    assert_eq!(whole["usage"]["completion_tokens"], 8);
    assert_eq!(whole["usage"]["prompt_tokens"], site.fake.request(0).prompt.len());
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
    let requests: Vec<_> = (0..3).map(|at| site.fake.request(at)).collect();
    assert_eq!(requests.iter().map(|r| r.sampling.choice).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(requests.iter().map(|r| r.sampling.seed).collect::<HashSet<_>>().len(), 1);
    assert_eq!(requests.iter().map(|r| r.id).collect::<HashSet<_>>().len(), 3);
}

#[tokio::test]
async fn prompts_come_as_text_as_tokens_and_as_lists_of_both() {
    let site = Site::start(|request| answer(request, &request.prompt[..1])).await;
    let cases: [(Value, &[&[u32]]); 5] = [
        (json!("ab"), &[&[BOS, 97, 98]]),
        (json!(["a", "b"]), &[&[BOS, 97], &[BOS, 98]]),
        (json!([97, 98]), &[&[97, 98]]),
        (json!([[97], [98, 99]]), &[&[97], &[98, 99]]),
        (json!("a<|im_end|>"), &[&[BOS, 97, IM_END]]),
    ];
    for (prompt, expected) in cases {
        let before = site.fake.taken_now();
        let response =
            site.post("/v1/completions", &json!({"model": "org/tiny-1", "prompt": prompt, "n": 2})).await;
        let whole = response.json();
        assert_eq!(response.status, 200, "{whole}");
        assert!(whole["id"].as_str().unwrap().starts_with("cmpl-"));
        assert_eq!((&whole["object"], &whole["model"]), (&json!("text_completion"), &json!("org/tiny-1")));
        let choices = whole["choices"].as_array().unwrap();
        assert_eq!(choices.len(), 2 * expected.len());
        for (at, choice) in choices.iter().enumerate() {
            let request = site.fake.request(before + at);
            assert_eq!(*request.prompt, *expected[at / 2], "{prompt}");
            assert_eq!(choice["index"], at);
            assert_eq!(choice["finish_reason"], "stop");
        }
        let tokens: usize = expected.iter().map(|prompt| prompt.len()).sum();
        assert_eq!(whole["usage"]["prompt_tokens"], tokens, "{prompt}");
    }
}

#[tokio::test]
async fn an_end_token_is_not_part_of_the_text_but_one_that_is_ignored_is_a_token_without_text() {
    let tokens = [bytes("ab"), vec![IM_END], bytes("c")].concat();
    let site = Site::start(move |request| answer(request, &tokens)).await;
    let whole = site.post("/v1/completions", &json!({"prompt": "x"})).await.json();
    assert_eq!(
        (&whole["choices"][0]["text"], &whole["usage"]["completion_tokens"]),
        (&json!("ab"), &json!(2))
    );
    let whole = site.post("/v1/completions", &json!({"prompt": "x", "ignore_eos": true})).await.json();
    assert_eq!(
        (&whole["choices"][0]["text"], &whole["usage"]["completion_tokens"]),
        (&json!("abc"), &json!(4))
    );
}

/// There is one model, so a request needn't name it, whichever API it speaks.
#[tokio::test]
async fn without_a_model_every_endpoint_takes_the_one_that_there_is() {
    let site = Site::start(says("ok")).await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/chat/completions/render", json!({"messages": messages})),
        ("/v1/completions", json!({"prompt": "hi"})),
        ("/v1/responses", json!({"input": "hi"})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 9})),
    ] {
        let answer = site.post(path, &body).await;
        assert_eq!((answer.status, &answer.json()["model"]), (200, &json!("tiny")), "{path}");
    }
    for (path, body) in [
        ("/v1/messages/count_tokens", json!({"messages": messages})),
        ("/tokenize", json!({"prompt": "hi"})),
        ("/detokenize", json!({"tokens": [97]})),
    ] {
        assert_eq!(site.post(path, &body).await.status, 200, "{path}");
    }
}
