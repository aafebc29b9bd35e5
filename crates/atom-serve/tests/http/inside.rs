//! `/server_info`, profiles, `/debug`.

use crate::client::JSON;
use crate::fake::{Profiling, Site, says};
use atom_serve::Engine;
use serde_json::json;

#[tokio::test]
async fn the_server_says_what_it_serves_and_how() {
    let site = Site::start(says("ok")).await;
    let told = site.get("/server_info").await.json();
    for (field, expected) in [
        ("model_id", json!("tiny")),
        ("served_model_name", json!(["tiny", "org/tiny-1"])),
        ("version", json!(env!("CARGO_PKG_VERSION"))),
        ("device", json!("paper")),
        ("tp_size", json!(1)),
        ("dp_size", json!(2)),
        ("lanes_per_group", json!(2)),
        ("nodes", json!(1)),
        ("step_rows", json!([8, 16, 32])),
        ("page_size", json!(16)),
    ] {
        assert_eq!(told[field], expected, "{field}");
    }
    assert_eq!(
        (&told["limits"]["max_model_len"], &told["limits"]["max_num_seqs"]),
        (&json!(1000), &json!(8))
    );
}

#[tokio::test]
async fn a_profile_begins_once_ends_once_and_needs_a_place() {
    let site = Site::start(says("ok")).await;
    let post = async |path: &str| site.post(path, &json!({})).await;
    for path in ["/start_profile", "/stop_profile"] {
        let refused = post(path).await;
        assert_eq!((refused.status, &refused.error()["code"]), (403, &json!("profiling_off")));
        assert!(refused.text().contains("--profile-dir"), "{}", refused.text());
    }
    *site.fake.profile.lock().unwrap() = Profiling::Ready;
    assert_eq!(post("/stop_profile").await.error()["code"], "no_profile");
    assert_eq!(post("/start_profile").await.json(), json!({"profiling": true}));
    let twice = post("/start_profile").await;
    assert_eq!((twice.status, &twice.error()["code"]), (409, &json!("profile_running")));
    let written = json!({"profiling": false, "file": "profiles/1.json", "steps": 12, "steps_lost": 0});
    assert_eq!(post("/stop_profile").await.json(), written);
    assert_eq!(post("/stop_profile").await.status, 409);
    // An order has no fields, and a form of some web page is none.
    assert_eq!(site.post("/start_profile", &json!({"steps": 5})).await.error()["code"], "unknown_field");
    let mut client = site.client().await;
    client.send("POST", "/start_profile", &[("content-type", "text/plain")], b"{}").await;
    assert_eq!(client.response().await.status, 415);
    client.send("POST", "/start_profile", &[JSON], b"").await;
    assert_eq!(client.response().await.status, 200);
}

#[tokio::test]
async fn an_order_without_a_body_and_without_a_content_type_was_a_415() {
    let site = Site::start_with(says("ok"), |options| options.admin = true).await;
    *site.fake.profile.lock().unwrap() = Profiling::Ready;
    let mut client = site.client().await;
    for path in ["/start_profile", "/stop_profile", "/admin/pause", "/admin/resume"] {
        // As `curl -X POST` and Python's requests send it.
        for length in ["", "content-length: 0\r\n"] {
            client.write(format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n{length}\r\n").as_bytes()).await;
            let taken = client.response().await;
            let twice = path.ends_with("_profile") && !length.is_empty();
            assert_eq!(taken.status, if twice { 409 } else { 200 }, "{path}: {}", taken.text());
        }
    }
    // A page of somebody else's can make its visitor's browser send that, which then says so.
    for mark in ["origin: null", "origin: https://evil.example", "sec-fetch-site: cross-site"] {
        for path in ["/start_profile", "/admin/pause"] {
            client
                .write(format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n{mark}\r\n\r\n").as_bytes())
                .await;
            let refused = client.response().await;
            let code = &refused.error()["code"];
            assert_eq!((refused.status, code), (415, &json!("unsupported_media_type")), "{path} {mark}");
        }
    }
    assert!(!site.fake.is_pausing());
    // Where fields are needed, nothing is no body.
    for path in ["/v1/chat/completions", "/tokenize", "/v1/messages"] {
        client.send("POST", path, &[], b"").await;
        assert_eq!(client.response().await.status, 415, "{path}");
    }
}

#[tokio::test]
async fn nothing_inside_is_shown_unless_the_operator_says_so() {
    let closed = Site::start(says("ok")).await;
    assert_eq!(closed.get("/debug/cache_stats").await.status, 404);
    let open = Site::start_with(says("ok"), |options| options.debug = true).await;
    let stats = open.get("/debug/cache_stats").await.json();
    assert_eq!(
        (&stats["token_cache"]["bytes"], &stats["kv_caches"][0]["pages_held"]),
        (&json!(0), &json!(3))
    );
}
