//! What lies below the API: heads that are no heads, floods, and connections that do as they please. Every one
//! of them is answered or closed, and the server goes on.

use crate::client::{Client, JSON, Response};
use crate::fake::{Play, Site, answer, bytes, says};
use atom_base::limits::{HEAD_BYTES_MAX, HEADERS_MAX, URI_BYTES_MAX};
use atom_engine::Request;
use atom_serve::ApiKeys;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use std::collections::HashSet;
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;

const CHAT: &str = "/v1/chat/completions";
const PLAIN: &str = "/v1/completions";

/// Connections that do nothing.
const IDLE: usize = 5000;
/// For other tests that run in this process.
const SPARE_DESCRIPTORS: u64 = 500;

/// A whole request as it goes over the wire.
fn post(body: &str, headers: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "POST {PLAIN} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n{headers}\r\n\
         {body}"
    )
    .into_bytes()
}

/// Checks that a new client is served as if nothing had been.
async fn still_serves(site: &Site, after: &str) {
    let response = site.post(PLAIN, &json!({"prompt": "x"})).await;
    assert_eq!(response.status, 200, "after {after}");
}

/// Begins an answer and waits for the gate before it goes on.
fn gated(request: &Request) -> Vec<Play> {
    let mut plays = answer(request, &bytes("ab"));
    plays.insert(2, Play::Gate);
    plays
}

#[tokio::test]
async fn what_is_no_head_of_ours_is_answered_in_the_apis_shape_with_an_id_of_its_own() {
    let site = Site::start(says("ok")).await;
    let flood: String = (0..=HEADERS_MAX).map(|n| format!("x-{n}: y\r\n")).collect();
    let wide = "y".repeat(HEAD_BYTES_MAX);
    let long = "y".repeat(URI_BYTES_MAX);
    let head = |line: &str, headers: &str| format!("{line}\r\n{headers}\r\n");
    let get = |headers: &str| head("GET /health HTTP/1.1\r\nhost: localhost", headers);
    let upload =
        |headers: &str| head(&format!("POST {PLAIN} HTTP/1.1\r\nhost: localhost"), headers) + "0\r\n\r\n";
    let cases: Vec<(&str, String, u16, &str)> = vec![
        ("no HTTP", "NONSENSE\r\n\r\n".into(), 400, "invalid_http"),
        ("a TLS hello", "\u{16}\u{3}\u{1}\u{2}\r\n\r\n".into(), 400, "invalid_http"),
        ("HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".into(), 400, "invalid_http"),
        ("HTTP/3", head("GET /health HTTP/3.0", ""), 400, "invalid_http"),
        ("HTTP/0.9", "GET /health\r\n\r\n".into(), 400, "invalid_http"),
        ("a method that is no word", head("GE(T /health HTTP/1.1", ""), 400, "invalid_http"),
        ("a null byte in the path", head("GET /hea\0lth HTTP/1.1", ""), 400, "invalid_http"),
        ("a null byte in a value", get("x: a\0b\r\n"), 400, "invalid_http"),
        ("a header without a colon", get("x\r\n"), 400, "invalid_http"),
        ("a space before the colon", get("x : y\r\n"), 400, "invalid_http"),
        ("a folded header", get("x: a\r\n b\r\n"), 400, "invalid_http"),
        ("a length that is none", upload("content-length: ten\r\n"), 400, "invalid_http"),
        ("a negative length", upload("content-length: -1\r\n"), 400, "invalid_http"),
        ("two lengths", upload("content-length: 1\r\ncontent-length: 2\r\n"), 400, "invalid_http"),
        ("a coding that is not known", upload("transfer-encoding: gzip\r\n"), 400, "invalid_http"),
        (
            "chunks in HTTP/1.0",
            head(&format!("POST {PLAIN} HTTP/1.0"), "transfer-encoding: chunked\r\n"),
            400,
            "invalid_http",
        ),
        (
            "a length before chunks",
            upload("content-length: 5\r\ntransfer-encoding: chunked\r\n"),
            400,
            "invalid_http",
        ),
        (
            "chunks before a length",
            upload("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n"),
            400,
            "invalid_http",
        ),
        ("a flood of headers", get(&flood), 431, "headers_too_large"),
        ("a wide header", get(&format!("x: {wide}\r\n")), 431, "headers_too_large"),
        ("an endless header", format!("GET /health HTTP/1.1\r\nx: {wide}{wide}"), 431, "headers_too_large"),
        ("an endless method", format!("{wide}{wide}"), 431, "headers_too_large"),
        ("a long URI", head(&format!("GET /{long} HTTP/1.1"), ""), 414, "uri_too_long"),
        ("a long query", head(&format!("GET /health?{long} HTTP/1.1"), ""), 414, "uri_too_long"),
        ("an endless URI", head(&format!("GET /{wide} HTTP/1.1"), ""), 431, "headers_too_large"),
    ];
    let mut ids = HashSet::new();
    for (what, sent, status, code) in &cases {
        let mut client = site.client().await;
        client.write(sent.as_bytes()).await;
        let response = client.response().await;
        assert_eq!((response.status, &response.error()["code"]), (*status, &json!(code)), "{what}");
        assert_eq!(response.error()["type"], "invalid_request_error", "{what}");
        let id = response.header("x-request-id").unwrap_or_else(|| panic!("no id: {what}"));
        assert!(ids.insert(id.to_owned()), "{what}: the id {id} was given twice");
        if *code != "uri_too_long" {
            assert!(client.is_closed().await, "{what}: nobody knows where the next request begins");
        }
        still_serves(&site, what).await;
    }
    let metrics = site.get("/metrics").await;
    assert!(metrics.text().contains("atom_http_requests_total{endpoint=\"other\",status=\"400\"} 1"));
}

#[tokio::test]
async fn a_bad_head_behind_good_requests_does_not_take_their_answers() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    let good = post(&json!({"prompt": "x"}).to_string(), "");
    client.write(&[&good[..], &good, b"NONSENSE\r\n\r\n"].concat()).await;
    assert_eq!(client.response().await.status, 200);
    assert_eq!(client.response().await.status, 200);
    let refused = client.response().await;
    assert_eq!((refused.status, &refused.error()["code"]), (400, &json!("invalid_http")));
    assert!(refused.header("x-request-id").is_some());
    assert!(client.is_closed().await);
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    let mut all = Vec::new();
    for number in 0..20 {
        let stream = number % 3 == 0;
        let id = format!("x-request-id: number-{number}\r\n");
        all.extend(post(&json!({"prompt": "x", "stream": stream}).to_string(), &id));
        all.extend(format!("GET /version HTTP/1.1\r\nx-request-id: version-{number}\r\n\r\n").bytes());
    }
    client.write(&all).await;
    for number in 0..20 {
        let answer = client.response().await;
        assert_eq!(answer.header("x-request-id"), Some(format!("number-{number}").as_str()));
        assert_eq!(answer.status, 200);
        let version = client.response().await;
        assert_eq!(version.header("x-request-id"), Some(format!("version-{number}").as_str()));
    }
}

#[tokio::test]
async fn methods_and_forms_of_uris() {
    let site = Site::start(says("ok")).await;
    let cases = [
        ("GET http://localhost:80/health HTTP/1.1\r\nhost: 127.0.0.1", 200),
        ("GET http://localhost:80/nowhere HTTP/1.1\r\nhost: localhost", 404),
        ("BREW /health HTTP/1.1\r\nhost: localhost", 405),
        ("TRACE /health HTTP/1.1\r\nhost: localhost", 405),
        ("OPTIONS /v1/models HTTP/1.1\r\nhost: localhost", 405),
        ("OPTIONS * HTTP/1.1\r\nhost: localhost", 404),
        ("GET /v1/../v1/models HTTP/1.1\r\nhost: localhost", 404),
        ("GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nhost: localhost", 404),
        ("GET //health HTTP/1.1\r\nhost: localhost", 404),
        ("GET /health HTTP/1.0", 200),
        ("GET /health HTTP/1.1\r\nupgrade: websocket\r\nconnection: upgrade", 200),
        ("CONNECT localhost:443 HTTP/1.1\r\nhost: localhost:443", 404),
    ];
    for (head, status) in cases {
        let mut client = site.client().await;
        client.write(format!("{head}\r\n\r\n").as_bytes()).await;
        let response = client.response().await;
        assert_eq!(response.status, status, "{head}");
        assert!(response.header("x-request-id").is_some(), "{head}");
        still_serves(&site, head).await;
    }
}

#[tokio::test]
async fn a_client_of_http_1_0_gets_a_stream_that_ends_with_the_connection() {
    let site = Site::start(says("ok")).await;
    let body = json!({"prompt": "x", "stream": true}).to_string();
    let mut client = site.client().await;
    let head = "content-type: application/json\r\ncontent-length:";
    client.write(format!("POST {PLAIN} HTTP/1.0\r\n{head} {}\r\n\r\n{body}", body.len()).as_bytes()).await;
    let head = client.head().await;
    assert_eq!((head.status, head.header("transfer-encoding")), (200, None));
    assert!(client.rest().await.ends_with("data: [DONE]\n\n"));
}

#[tokio::test]
async fn a_client_that_has_sent_all_it_will_gets_its_answer() {
    let site = Site::start(gated).await;
    // Whole: the interim response shows that the end of what it sends was seen.
    let mut client = site.client().await;
    client.write(&post(&json!({"prompt": "x"}).to_string(), "")).await;
    client.half_close().await;
    assert_eq!(client.head().await.status, 100);
    site.fake.gate.add_permits(1);
    let mut response = client.head().await;
    while response.status == 100 {
        response = client.head().await;
    }
    assert_eq!(response.status, 200);
    assert!(client.rest().await.contains("\"text\":\"ab\""));

    // Streamed: a comment does.
    let mut client = site.client().await;
    client.write(&post(&json!({"prompt": "x", "stream": true}).to_string(), "")).await;
    client.half_close().await;
    let mut text = String::new();
    let mut has_asked = false;
    let mut response = client.head().await;
    while response.status == 100 {
        response = client.head().await;
    }
    while let Some(chunk) = client.chunk().await {
        text.push_str(std::str::from_utf8(&chunk).unwrap());
        if !has_asked && text.contains(": still here\n\n") {
            has_asked = true;
            site.fake.gate.add_permits(1);
        }
    }
    assert!(has_asked && text.ends_with("data: [DONE]\n\n"), "{text}");

    // Several at once, the last of them with a body in chunks; and HTTP/1.0, which knows no interim response.
    site.fake.gate.add_permits(4);
    let mut client = site.client().await;
    let chunked = format!(
        "POST {PLAIN} HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n\
         e\r\n{{\"prompt\":\"x\"}}\r\n0\r\n\r\n"
    );
    let whole = post(&json!({"prompt": "x"}).to_string(), "");
    client.write(&[&whole[..], &whole, chunked.as_bytes()].concat()).await;
    client.half_close().await;
    let all = client.rest().await;
    assert_eq!(all.matches("HTTP/1.1 200 OK").count(), 3, "{all}");
    let mut client = site.client().await;
    let old = String::from_utf8(whole).unwrap().replace("HTTP/1.1", "HTTP/1.0");
    client.write(old.as_bytes()).await;
    client.half_close().await;
    let all = client.rest().await;
    assert!(all.starts_with("HTTP/1.0 200 OK") && all.contains("\"text\":\"ab\""), "{all}");
    assert_eq!(site.fake.aborted_now(), 0);
}

/// The answer to a request that lies in the socket with the end of what its client sends, before the server runs.
async fn answer_to_a_closed_side(site: &Site, sent: &[u8]) -> String {
    // Nothing here gives way to the server's task, which has this thread only.
    let mut stream = TcpStream::connect(site.address).unwrap();
    stream.write_all(sent).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    stream.set_nonblocking(true).unwrap();
    Client::over(tokio::net::TcpStream::from_std(stream).unwrap()).rest().await
}

#[tokio::test]
async fn a_client_whose_end_came_with_its_request_got_no_answer() {
    let site = Site::start(says("ok")).await;
    let whole = post(&json!({"prompt": "x"}).to_string(), "");
    let stream = post(&json!({"prompt": "x", "stream": true}).to_string(), "");
    let get = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let cases = [
        (get.to_vec(), 1, ""),
        (whole.clone(), 1, "\"text\":\"ok\""),
        (stream.clone(), 1, "data: [DONE]\n\n"),
        ([&get[..], &whole, &stream, &get[..], &whole].concat(), 5, "\"text\":\"ok\""),
    ];
    for (sent, answers, words) in &cases {
        for attempt in 0..50 {
            let all = answer_to_a_closed_side(&site, sent).await;
            let is_whole = all.matches("HTTP/1.1 200 OK").count() == *answers && all.contains(words);
            assert!(is_whole, "attempt {attempt}: {all:?} to {}", String::from_utf8_lossy(sent));
        }
    }
    assert_eq!(site.fake.aborted_now(), 0);
}

#[tokio::test]
async fn a_client_that_ends_within_its_body_is_told_and_one_that_ends_within_its_head_is_not() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    let whole = post(&json!({"prompt": "x"}).to_string(), "");
    client.write(&whole[..whole.len() - 1]).await;
    client.half_close().await;
    let response = client.response().await;
    assert_eq!(response.status, 400, "{}", response.text());
    assert!(response.error()["message"].as_str().unwrap().contains("did not arrive"), "{}", response.text());
    assert_eq!(site.fake.taken_now(), 0);

    for cut in ["", "GET", "GET /health HTTP/1.1\r\nhost"] {
        let mut client = site.client().await;
        client.write(cut.as_bytes()).await;
        client.half_close().await;
        client.rest().await;
    }
    still_serves(&site, "ends").await;
}

/// Lets this process have so many descriptors, or says what to do where the machine doesn't.
fn allow_descriptors(wanted: u64) {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= wanted) {
        return;
    }
    let most = limit.maximum.map_or("any number".into(), |maximum| maximum.to_string());
    let raised = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    let has_enough = raised.is_ok() && limit.maximum.is_none_or(|maximum| maximum >= wanted);
    assert!(
        has_enough,
        "this test needs {wanted} descriptors, and this machine allows a process {most} ({raised:?}): raise the hard limit \
         (ulimit -Hn, LimitNOFILE=, docker run --ulimit nofile={wanted}) and run it again"
    );
}

#[tokio::test]
async fn thousands_of_idle_connections_take_nothing_from_those_that_ask() {
    // Each takes a descriptor of the client and one of the server, which are one process here.
    allow_descriptors(2 * IDLE as u64 + SPARE_DESCRIPTORS);
    // None of them is to be closed meanwhile, however slow the machine is.
    let site = Site::start_with(says("ok"), |options| options.idle_timeout = Duration::from_secs(3600)).await;
    let mut idle: Vec<Client> = Vec::new();
    for number in 0..IDLE {
        idle.push(site.client().await);
        if number % 100 == 0 {
            // The backlog has an end too.
            still_serves(&site, "some connections").await;
        }
    }
    for _ in 0..50 {
        still_serves(&site, "all connections").await;
        let stream =
            site.post(CHAT, &json!({"messages": [{"role": "user", "content": "x"}], "stream": true})).await;
        assert_eq!(stream.status, 200);
    }
    // All of them were there, and are.
    for idle in &mut idle {
        assert_eq!(idle.get("/health").await.status, 200, "the idle ones are served when they ask");
    }
}

#[tokio::test]
async fn queries_of_any_kind_and_paths_out_of_the_pages_folder_find_nothing() {
    let keys = Arc::new(ApiKeys::new(["key"]).unwrap());
    let site = Site::start_with(says("ok"), |options| options.api_keys = keys).await;
    let mut client = site.client().await;
    let query = "a=b&".repeat((URI_BYTES_MAX - 100) / 4);
    client.send("GET", &format!("/health?{query}%00%zz&=&&"), &[], b"").await;
    assert_eq!(client.response().await.status, 200);
    for path in [
        "/ui/../../Cargo.toml",
        "/ui/%2e%2e/%2e%2e/Cargo.toml",
        "/ui/..%2fserver.rs",
        "/ui//atom.js",
        "/UI/atom.js",
        "/ui/atom.js/",
        "/ui/atom.js%00",
        "//etc/passwd",
        "/health/../v1/models",
        "/health/../metrics",
        "/%68ealth",
    ] {
        for (headers, status) in [(&[][..], 401), (&[("x-api-key", "key")], 404)] {
            client.send("GET", path, headers, b"").await;
            assert_eq!(client.response().await.status, status, "{path}");
        }
    }
}

#[tokio::test]
async fn an_error_was_as_long_as_what_the_client_had_sent() {
    let site = Site::start(says("ok")).await;
    let long = "é".repeat(1 << 20);
    let hello = json!([{"role": "user", "content": "x"}]);
    for path in [CHAT, "/v1/messages", "/v1/responses"] {
        for body in [
            json!({"messages": hello, "input": "x", "model": long}),
            json!({"messages": hello, "input": "x", long.as_str(): 1}),
            json!({"messages": hello, "input": "x", "tools": [{"type": long}]}),
            json!({"messages": hello, "input": "x", "tool_choice": long}),
            json!({"messages": [{"role": long, "content": "x"}], "input": [{"role": long}]}),
        ] {
            let response = site.post(path, &body).await;
            assert!(response.status >= 400, "{path}");
            let size = response.body.len();
            assert!(
                size < 5000,
                "{path}: {size} bytes, {:?}",
                response.text().chars().take(200).collect::<String>()
            );
        }
    }
    still_serves(&site, "long names").await;
}

#[tokio::test]
async fn a_request_for_two_hosts_was_served() {
    let site = Site::start(says("ok")).await;
    for hosts in
        ["host: localhost\r\nhost: localhost\r\n", "Host: a.example\r\nhost: localhost\r\nhost: b\r\n"]
    {
        let mut client = site.client().await;
        client.write(format!("GET /health HTTP/1.1\r\n{hosts}\r\n").as_bytes()).await;
        let response = client.response().await;
        assert_eq!((response.status, &response.error()["code"]), (400, &json!("invalid_http")), "{hosts}");
        assert!(response.text().contains("Host headers"), "{}", response.text());
    }
}

#[tokio::test]
async fn bodies_that_say_a_thing_twice_or_too_much_are_refused() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    let chat = |messages: &str, more: &str| format!("{{\"messages\": [{messages}]{more}}}");
    let hello = r#"{"role": "user", "content": "x"}"#;
    let many = vec![hello; 10_000].join(",");
    let nested = |depth: usize| format!(", \"metadata\": {}1{}", "{\"a\":".repeat(depth), "}".repeat(depth));
    let file =
        r#"{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}"#;
    let path = r#"{"role": "user", "content": [{"type": "input_file", "path": "/etc/passwd"}]}"#;
    let cases: Vec<(String, u16, &str, &str)> = vec![
        (chat(hello, ", \"n\": 1, \"n\": 100"), 400, "duplicate_field", "'n' comes twice"),
        (chat(hello, ", \"messages\": []"), 400, "duplicate_field", "'messages' comes twice"),
        (
            chat(hello, ", \"user\": \"a\", \"\\u0075ser\": \"b\""),
            400,
            "duplicate_field",
            "'user' comes twice",
        ),
        (
            chat(r#"{"role": "user", "role": "system", "content": "x"}"#, ""),
            400,
            "duplicate_field",
            "'messages[0].role' comes twice",
        ),
        (chat(hello, ", \"logit_bias\": {\"5\": 1, \"5\": 2}"), 400, "duplicate_field", "'logit_bias.5'"),
        (chat(&many, ""), 400, "context_length_exceeded", "900"),
        (chat(hello, &nested(200)), 400, "invalid_json", "recursion limit"),
        (chat(hello, ", \"user\": \"a\0b\""), 400, "invalid_json", "control character"),
        (chat(hello, ", \"seed\": 18446744073709551616"), 400, "invalid_value", "1.8446744073709552e+19"),
        (chat(hello, ", \"max_tokens\": -9223372036854775809"), 400, "invalid_value", "-9.2"),
        (chat(hello, ", \"top_k\": 4294967296"), 400, "invalid_value", "4294967296"),
        (chat(hello, ", \"chat_template\": \"{{ 1 }}\""), 400, "unknown_field", "chat_template"),
        (chat(file, ""), 400, "invalid_value", "image_url"),
        (chat(path, ""), 400, "invalid_value", "input_file"),
    ];
    for (body, status, code, words) in &cases {
        client.send("POST", CHAT, &[JSON], body.as_bytes()).await;
        let response: Response = client.response().await;
        let text = response.text().to_owned();
        assert_eq!((response.status, &response.error()["code"]), (*status, &json!(code)), "{text}");
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(site.fake.taken_now(), 0);
    let fine = chat(hello, &format!(", \"user\": \"a\\u0000b\"{}", nested(100)));
    client.send("POST", CHAT, &[JSON], fine.as_bytes()).await;
    assert_eq!(client.response().await.status, 200, "a null byte that is spelled out is a character");
}
