//! What must be refused: with which status, naming what, and the server goes on.

use crate::client::{Client, JSON, Response};
use crate::document;
use crate::fake::{Site, says};
use atom_base::limits::BODY_BYTES_MAX;
use serde_json::{Map, Value, json};

const CHAT: &str = "/v1/chat/completions";
const PLAIN: &str = "/v1/completions";

/// A request that is fine but for `fields`.
fn with(path: &str, fields: &Value) -> Value {
    let mut body = Map::new();
    if path == CHAT {
        body.insert("messages".into(), json!([{"role": "user", "content": "hi"}]));
    } else {
        body.insert("prompt".into(), json!("hi"));
    }
    body.extend(fields.as_object().unwrap().clone());
    Value::Object(body)
}

fn refused(
    response: &Response,
    status: u16,
    param: Option<&str>,
    words: &[&str],
    case: &dyn std::fmt::Display,
) {
    assert_eq!(response.status, status, "{case}: {:.300}", response.text());
    let error = response.error();
    let message = error["message"].as_str().unwrap();
    assert_eq!(error["param"].as_str(), param, "{case}: {error}");
    for word in words {
        assert!(message.contains(word), "{case}: no {word:?} in {message:?}");
    }
}

#[tokio::test]
async fn fields_out_of_range_or_of_the_wrong_type_are_refused_by_name_and_number() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    let many: Vec<String> = (0..17).map(|n| format!("stop {n}")).collect();
    let biases: Map<String, Value> = (0..1025).map(|n| (n.to_string(), json!(1))).collect();
    // Fields of both endpoints: what is sent, which field is named, what the message says.
    let cases: Vec<(Value, &str, &[&str])> = vec![
        (json!({"n": 0}), "n", &["is 0", "1 to 128"]),
        (json!({"n": -1}), "n", &["-1"]),
        (json!({"n": 129}), "n", &["129"]),
        (json!({"n": 100}), "n", &["100 continuations", "at most 80"]),
        (json!({"n": "two"}), "n", &["the string \"two\""]),
        (json!({"n": 1.5}), "n", &["1.5"]),
        (json!({"temperature": -0.1}), "temperature", &["-0.1", "from 0 to 2"]),
        (json!({"temperature": 2.1}), "temperature", &["2.1"]),
        (json!({"temperature": 1e300}), "temperature", &["1e+300", "from 0 to 2"]),
        (json!({"temperature": "NaN"}), "temperature", &["the string \"NaN\"", "a number"]),
        (json!({"temperature": [1]}), "temperature", &["a list of 1"]),
        (json!({"top_p": 0}), "top_p", &["above 0"]),
        (json!({"top_p": 1.01}), "top_p", &["1.01"]),
        (json!({"top_k": -2}), "top_k", &["-2"]),
        (json!({"top_k": 1e12}), "top_k", &["1000000000000"]),
        (json!({"min_p": 1.5}), "min_p", &["1.5"]),
        (json!({"seed": 1e30}), "seed", &["1e+30"]),
        (json!({"seed": 9_223_372_036_854_775_808_u64}), "seed", &["9223372036854775808"]),
        (json!({"seed": "7"}), "seed", &["whole number"]),
        (json!({"presence_penalty": 2.5}), "presence_penalty", &["2.5", "from -2 to 2"]),
        (json!({"frequency_penalty": -3}), "frequency_penalty", &["-3"]),
        (json!({"repetition_penalty": 0}), "repetition_penalty", &["from 0.01 to 2"]),
        (json!({"logit_bias": [1]}), "logit_bias", &["a list of 1", "an object"]),
        (json!({"logit_bias": {"x": 1}}), "logit_bias", &["token ids"]),
        (json!({"logit_bias": {"05": 1}}), "logit_bias", &["\"05\""]),
        (json!({"logit_bias": {"5": "1"}}), "logit_bias.5", &["a number"]),
        (json!({"logit_bias": {"5": 101}}), "logit_bias", &["101", "from -100 to 100"]),
        (json!({"logit_bias": {"264": 1}}), "logit_bias", &["264"]),
        (json!({"logit_bias": {"6723008771": 1}}), "logit_bias", &["6723008771", "for tokens below 264"]),
        (json!({"logit_bias": {"": 1}}), "logit_bias", &["token ids"]),
        (json!({ "logit_bias": biases }), "logit_bias", &["1025", "1024"]),
        (json!({"stop": 5}), "stop", &["a string or a list of strings"]),
        (json!({"stop": ["a", 5]}), "stop", &["5"]),
        (json!({"stop": ["a", ""]}), "stop[1]", &["empty"]),
        (json!({ "stop": many }), "stop", &["17", "16"]),
        (json!({"stop": "x".repeat(1025)}), "stop[0]", &["1025", "1024"]),
        (json!({"stop_token_ids": [264]}), "stop_token_ids", &["264", "0 to 263"]),
        (json!({"stop_token_ids": "10"}), "stop_token_ids", &["a list"]),
        (json!({"stop_token_ids": vec![1; 65]}), "stop_token_ids", &["65", "64"]),
        (json!({"max_tokens": -1}), "max_tokens", &["-1"]),
        (json!({"max_tokens": 0}), "max_tokens", &["is 0; it must be"]),
        (json!({"max_tokens": 1e10}), "max_tokens", &["10000000000"]),
        (json!({"max_completion_tokens": "many"}), "max_completion_tokens", &["whole number"]),
        (json!({"ignore_eos": 1}), "ignore_eos", &["true or false"]),
        (json!({"stream": "yes"}), "stream", &["true or false"]),
        (json!({"stream_options": {"include_usage": true}}), "stream_options", &["without a stream"]),
        (json!({"stream": true, "stream_options": {"x": 1}}), "stream_options.x", &["unknown field"]),
        (json!({"stream": true, "stream_options": []}), "stream_options", &["an object"]),
        (json!({"data_parallel_rank": 2}), "data_parallel_rank", &["2 lanes"]),
        (json!({"data_parallel_rank": -1}), "data_parallel_rank", &["-1"]),
        (json!({"user": 5}), "user", &["a string"]),
        (json!({"metadata": "x"}), "metadata", &["an object"]),
        (json!({"model": 5}), "model", &["a string"]),
    ];
    for path in [CHAT, PLAIN] {
        for (fields, param, words) in &cases {
            let body = with(path, fields);
            refused(&client.post(path, &body).await, 400, Some(param), words, fields);
        }
    }
    let own: Vec<(&str, Value, &str, &[&str])> = vec![
        (CHAT, json!({"messages": []}), "messages", &["at least one message"]),
        (CHAT, json!({"messages": null}), "messages", &["missing"]),
        (CHAT, json!({"messages": "hi"}), "messages", &["a list"]),
        (CHAT, json!({"messages": ["hi"]}), "messages[0]", &["an object"]),
        (CHAT, json!({"messages": [{"content": "x"}]}), "messages[0].role", &["missing"]),
        (
            CHAT,
            json!({"messages": [{"role": "king", "content": "x"}]}),
            "messages[0].role",
            &["\"king\"", "user"],
        ),
        (
            CHAT,
            json!({"messages": [{"role": "tool", "content": "x"}]}),
            "messages[0].tool_call_id",
            &["missing"],
        ),
        (CHAT, json!({"messages": [{"role": "user"}]}), "messages[0].content", &["missing"]),
        (CHAT, json!({"messages": [{"role": "user", "content": null}]}), "messages[0].content", &["missing"]),
        (CHAT, json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content", &["number"]),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
            "messages[0].content[0]",
            &["image_url"],
        ),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "x", "mood": 1}]}),
            "messages[0].mood",
            &["unknown"],
        ),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}),
            "messages",
            &["system comes first"],
        ),
        (CHAT, json!({"logprobs": 5}), "logprobs", &["true or false"]),
        (CHAT, json!({"top_logprobs": 3}), "top_logprobs", &["'logprobs' is true"]),
        (CHAT, json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs", &["21", "20"]),
        (CHAT, json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs.messages", &[]),
        (CHAT, json!({"chat_template_kwargs": 1}), "chat_template_kwargs", &["an object"]),
        (CHAT, json!({"prompt": "x"}), "prompt", &["unknown"]),
        (PLAIN, json!({"prompt": null}), "prompt", &["missing"]),
        (PLAIN, json!({"prompt": 5}), "prompt", &["a string"]),
        (PLAIN, json!({"prompt": []}), "prompt", &["not empty"]),
        (PLAIN, json!({"prompt": [[]]}), "prompt", &["at least one token"]),
        (PLAIN, json!({"prompt": [1, "a"]}), "prompt[1]", &["\"a\""]),
        (PLAIN, json!({"prompt": ["a", 1]}), "prompt[1]", &["1"]),
        (PLAIN, json!({"prompt": [97, 264]}), "prompt[1]", &["264"]),
        (PLAIN, json!({"prompt": [[97], [-1]]}), "prompt[1][0]", &["-1"]),
        (PLAIN, json!({"prompt": vec!["a"; 2049]}), "prompt", &["2049", "2048"]),
        (PLAIN, json!({"logprobs": true}), "logprobs", &["0 to 20"]),
        (PLAIN, json!({"logprobs": 21}), "logprobs", &["21"]),
        (PLAIN, json!({"echo": "yes"}), "echo", &["true or false"]),
        (PLAIN, json!({"echo": true, "max_tokens": 0}), "max_tokens", &["'logprobs'"]),
        (PLAIN, json!({"messages": []}), "messages", &["unknown"]),
        (PLAIN, json!({"top_logprobs": 2}), "top_logprobs", &["unknown"]),
    ];
    for (path, fields, param, words) in &own {
        refused(&client.post(path, &with(path, fields)).await, 400, Some(param), words, fields);
    }
    assert_eq!(site.fake.taken_now(), 0, "nothing of this reached the engine");
    assert_eq!(client.post(CHAT, &with(CHAT, &json!({}))).await.status, 200, "and the server goes on");
}

#[tokio::test]
async fn what_would_change_the_answer_and_is_not_built_is_refused_by_name() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    let fields = [
        json!({"tools": [{"type": "function"}]}),
        json!({"tool_choice": "required"}),
        json!({"functions": [{}]}),
        json!({"function_call": "auto"}),
        json!({"modalities": ["text", "audio"]}),
        json!({"audio": {}}),
        json!({"prediction": {}}),
        json!({"reasoning_effort": "low"}),
        json!({"verbosity": "low"}),
        json!({"web_search_options": {}}),
        json!({"logits_processors": []}),
        json!({"best_of": 2}),
        json!({"suffix": "end"}),
        json!({"store": true}),
        json!({"service_tier": "flex"}),
        json!({"stream": true, "stream_options": {"include_obfuscation": true}}),
        json!({"frobnicate": 1}),
        json!({"min_tokens": 5}),
        json!({"prompt_logprobs": 5}),
    ];
    for path in [CHAT, PLAIN] {
        for field in &fields {
            let name = field.as_object().unwrap().keys().next_back().unwrap();
            let response = client.post(path, &with(path, field)).await;
            assert_eq!(response.status, 400, "{field}");
            let error = response.error();
            assert!(error["message"].as_str().unwrap().contains(name.as_str()), "{error}");
            assert!(error["param"].as_str().unwrap().starts_with(name.as_str()), "{error}");
        }
    }
    let fine = client.post(CHAT, &with(CHAT, &json!({"echo": true}))).await;
    refused(&fine, 400, Some("echo"), &["not supported"], &"echo in chat");
}

#[tokio::test]
async fn a_model_that_is_not_served_is_a_404_with_the_names() {
    let site = Site::start(says("ok")).await;
    for path in [CHAT, PLAIN] {
        let response = site.post(path, &with(path, &json!({"model": "gpt-9"}))).await;
        refused(&response, 404, Some("model"), &["'gpt-9'", "'tiny'", "'org/tiny-1'"], &path);
        assert_eq!(response.error()["code"], "model_not_found");
    }
}

#[tokio::test]
async fn prompts_that_can_not_fit_are_refused_with_the_numbers() {
    let site = Site::start(says("ok")).await;
    // A context of 1000, a cache of 900.
    let long = |tokens: usize| json!({"prompt": vec![97; tokens], "max_tokens": 10});
    let response = site.post(PLAIN, &long(995)).await;
    refused(&response, 400, None, &["1000", "995", "10"], &"longer than the model");
    assert_eq!(response.error()["code"], "context_length_exceeded");
    let response = site.post(PLAIN, &long(895)).await;
    refused(&response, 400, None, &["905", "900"], &"longer than the cache");
    assert_eq!(site.post(PLAIN, &long(890)).await.status, 200);

    let words = |count: usize| json!({"messages": [{"role": "user", "content": "a".repeat(count)}]});
    let response = site.post(CHAT, &words(1000)).await;
    refused(&response, 400, None, &["900"], &"a chat without room for an answer");
    let megabytes = words(8_000_000);
    let response = site.post(CHAT, &megabytes).await;
    refused(&response, 400, None, &["bytes", "900"], &"known by its length alone");
    let absurd = with(CHAT, &json!({"max_tokens": u32::MAX}));
    refused(&site.post(CHAT, &absurd).await, 400, None, &["4294967295"], &"absurd max_tokens");
}

#[tokio::test]
async fn bodies_that_are_no_json_object_are_refused_with_the_place() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    let deep = "[".repeat(100_000);
    let bodies: [(&[u8], &str); 8] = [
        (b"", "the body is empty"),
        (b"{", "line 1"),
        (b"{\"messages\": [}", "column"),
        (b"[1, 2]", "a list of 2"),
        (b"\"text\"", "the body is the string"),
        (b"{\"temperature\": 1e999}", "out of range"),
        (b"{\"user\": \"\xc3\x28\"}", "UTF-8"),
        (deep.as_bytes(), "recursion"),
    ];
    for (body, words) in bodies {
        client.send("POST", CHAT, &[JSON], body).await;
        let response = client.response().await;
        refused(&response, 400, None, &[words], &words);
        assert_eq!(response.error()["code"], "invalid_json");
    }
}

#[tokio::test]
async fn other_content_types_are_refused_since_a_web_page_could_send_them() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    let body = with(CHAT, &json!({})).to_string();
    for headers in [
        vec![],
        vec![("content-type", "text/plain")],
        vec![("content-type", "application/x-www-form-urlencoded")],
    ] {
        client.send("POST", CHAT, &headers, body.as_bytes()).await;
        let response = client.response().await;
        refused(&response, 415, None, &["application/json"], &format!("{headers:?}"));
    }
    for fine in ["Application/JSON", "application/json; charset=utf-8"] {
        client.send("POST", CHAT, &[("content-type", fine)], body.as_bytes()).await;
        assert_eq!(client.response().await.status, 200);
    }
}

#[tokio::test]
async fn charsets_encodings_and_bodies_of_another_kind_were_ignored_or_taken_for_no_json() {
    let site = Site::start_with(says("ok"), |options| options.admin = true).await;
    let mut client = site.client().await;
    let document = document::fetch(&mut client).await;
    let paths = document["paths"].as_object().unwrap().iter();
    let posts: Vec<_> = paths.filter(|(_, path)| path.get("post").is_some()).map(|(path, _)| path).collect();
    assert!(posts.len() > 14, "{posts:?}");
    let json = "application/json";
    type Headers = &'static [(&'static str, &'static str)];
    let cases: [(Headers, &[u8], u16, &str); 11] = [
        (&[("content-type", "application/json; charset=utf-16")], b"{}", 415, "charset is 'utf-16'"),
        (
            &[("content-type", "application/json;Charset = \"latin1\"; a=b")],
            b"{}",
            415,
            "charset is 'latin1'",
        ),
        (&[JSON, ("content-type", "text/plain")], b"{}", 415, "content type is 'text/plain'"),
        (&[JSON, ("content-encoding", "gzip")], b"\x1f\x8b", 415, "Content-Encoding is 'gzip'"),
        (&[JSON, ("content-encoding", "identity, GZIP")], b"{}", 415, "'GZIP'"),
        (
            &[JSON, ("content-encoding", "identity"), ("content-encoding", "gzip")],
            b"{}",
            415,
            "Content-Encoding is 'gzip'",
        ),
        (&[JSON], b"[{}, {}]", 400, "the body is a list of 2; it must be a JSON object"),
        (&[JSON], b"\"{}\"", 400, "the body is the string \\\"{}\\\"; it must"),
        (&[JSON], b"null", 400, "the body is null; it must"),
        (&[JSON], b"12", 400, "the body is 12; it must"),
        (&[JSON], b"{", 400, "the body is not valid JSON"),
    ];
    for path in posts {
        for (headers, body, status, words) in cases {
            client.send("POST", path, headers, body).await;
            let response = client.response().await;
            assert_eq!(response.status, status, "{path} {headers:?}: {}", response.text());
            assert!(response.text().contains(words), "{path} {headers:?}: {}", response.text());
            let accepts = headers.iter().any(|(name, _)| *name == "content-encoding").then_some("identity");
            assert_eq!(response.header("accept-encoding"), accepts, "{path} {headers:?}");
        }
        let more = "transfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
        client
            .write(
                format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {json}\r\n{more}")
                    .as_bytes(),
            )
            .await;
        let response = client.response().await;
        assert_eq!(response.status, 415, "{path}: {}", response.text());
        assert!(response.text().contains("Transfer-Encoding is 'gzip'"), "{path}: {}", response.text());
    }
    let body = with(CHAT, &json!({})).to_string();
    for charset in ["; charset=utf-8", ";charset=\"UTF-8\"", "; charset=utf8", "; profile=x", ";"] {
        let kind = format!("{json}{charset}");
        for encoding in ["identity", "Identity", ""] {
            client
                .send(
                    "POST",
                    CHAT,
                    &[("content-type", &kind), ("content-encoding", encoding)],
                    body.as_bytes(),
                )
                .await;
            assert_eq!(client.response().await.status, 200, "{charset} {encoding}");
        }
    }
}

#[tokio::test]
async fn paths_and_methods_that_are_not_there_are_told_in_the_apis_shape() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    refused(&client.get("/v1/embeddings").await, 404, None, &["/v1/embeddings", "/v1/completions"], &"path");
    let response = client.get(CHAT).await;
    refused(&response, 405, None, &["GET", CHAT], &"method");
    assert_eq!(response.header("allow"), Some("POST"));
    client.send("DELETE", "/v1/models/tiny", &[], b"").await;
    refused(&client.response().await, 405, None, &["DELETE"], &"method");
    refused(&client.post("/health", &json!({})).await, 405, None, &["POST"], &"method");
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_a_413_even_to_a_client_that_sends_all_of_it_first() {
    let site = Site::start(says("ok")).await;
    let size = BODY_BYTES_MAX + 1;
    let body = vec![b' '; size];
    let mut client = site.client().await;
    client.send("POST", CHAT, &[JSON], &body).await;
    let response = client.response().await;
    refused(&response, 413, None, &[&size.to_string(), &BODY_BYTES_MAX.to_string()], &"declared");
    assert_eq!(client.post(CHAT, &with(CHAT, &json!({}))).await.status, 200, "on the same connection");

    let mut client = site.client().await;
    client.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n").await;
    for chunk in body.chunks(1 << 20) {
        client.write(format!("{:x}\r\n", chunk.len()).as_bytes()).await;
        client.write(chunk).await;
        client.write(b"\r\n").await;
    }
    client.write(b"0\r\n\r\n").await;
    refused(&client.response().await, 413, None, &[&size.to_string()], &"chunked");

    let mut client = site.client().await;
    client.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99000000000\r\n\r\n").await;
    refused(&client.response().await, 413, None, &["99000000000"], &"absurd: nothing of it is read");
}

#[tokio::test(start_paused = true)]
async fn a_body_or_a_head_that_never_comes_is_a_408() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    client.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n{").await;
    refused(&client.response().await, 408, None, &["30 seconds"], &"body");
    let mut client = site.client().await;
    client.write(b"POST /v1/comp").await;
    refused(&client.response().await, 408, None, &["75 seconds"], &"head");
    assert!(client.is_closed().await);
}

#[tokio::test]
async fn what_is_not_http_closes_its_connection_and_nothing_else() {
    let site = Site::start(says("ok")).await;
    let mut good = site.client().await;
    assert_eq!(good.get("/health").await.status, 200);
    for garbage in [&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"[..], b"NONSENSE\r\n\r\n", &[0xff; 64]] {
        let mut bad = Client::connect(site.address).await;
        bad.write(garbage).await;
        bad.write(b"\r\n\r\n").await;
        while !bad.is_closed().await {}
    }
    assert_eq!(good.get("/health").await.status, 200);
}
