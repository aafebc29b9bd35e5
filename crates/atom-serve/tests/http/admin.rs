//! Orders to the engine over HTTP.

use crate::client::JSON;
use crate::fake::{DRAIN, Play, Site, answer, bytes, says};
use atom_engine::Request;
use atom_serve::Engine;
use serde_json::json;
use std::sync::atomic::Ordering;

#[tokio::test]
async fn pause_and_resume_reach_the_engine() {
    let site = Site::start_with(says("ok"), |options| options.admin = true).await;
    let paused = site.post("/admin/pause", &json!({})).await;
    assert_eq!((paused.status, &paused.json()["paused"]), (200, &json!(true)));
    assert!(site.fake.is_pausing());
    let resumed = site.post("/admin/resume", &json!({})).await;
    assert_eq!((resumed.status, &resumed.json()["paused"]), (200, &json!(false)));
    assert!(!site.fake.is_pausing());
}

#[tokio::test]
async fn a_drain_refuses_what_comes_after_it() {
    let site = Site::start_with(says("ok"), |options| options.admin = true).await;
    for _ in 0..2 {
        let drained = site.post("/admin/drain", &json!({})).await;
        assert_eq!((drained.status, &drained.json()["draining"]), (200, &json!(true)));
    }
    assert!(site.fake.drained.load(Ordering::SeqCst), "the engine tells other hosts");
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let refused = site.post("/v1/chat/completions", &chat).await;
    assert_eq!((refused.status, &refused.error()["code"]), (503, &json!("shutting_down")));
    assert_eq!(site.get("/health").await.status, 503);
}

#[tokio::test]
async fn exit_ends_the_server_as_a_signal_does() {
    let site = Site::start_with(says("ok"), |options| options.admin = true).await;
    site.post("/admin/pause", &json!({})).await;
    assert_eq!(site.post("/admin/exit", &json!({})).await.status, 200);
    let fake = site.fake.clone();
    assert_eq!(site.ended().await.cut, 0);
    assert!(!fake.is_pausing(), "the engine of other hosts goes on too, though nothing ran here");
}

/// Answers as soon as the engine is not paused.
fn rests(request: &Request) -> Vec<Play> {
    [vec![Play::Rest], answer(request, &bytes("ok"))].concat()
}

#[tokio::test]
async fn a_signal_or_an_exit_during_a_pause_answers_what_was_taken() {
    for over_http in [false, true] {
        let set = |options: &mut atom_serve::ServerOptions| (options.admin, options.drain) = (true, DRAIN);
        let mut site = Site::start_with(rests, set).await;
        assert_eq!(site.post("/admin/pause", &json!({})).await.status, 200);
        let mut waiting = site.client().await;
        waiting.send("POST", "/v1/completions", &[JSON], br#"{"prompt": "x"}"#).await;
        while site.fake.taken_now() == 0 {
            tokio::task::yield_now().await;
        }
        if over_http {
            assert_eq!(site.post("/admin/exit", &json!({})).await.status, 200);
        } else {
            site.stop();
        }
        assert_eq!(waiting.response().await.status, 200);
        assert_eq!(site.ended().await.cut, 0);
    }
}

#[tokio::test]
async fn a_pause_of_another_host_does_not_hold_up_a_server_that_leaves() {
    let script = |request: &Request| [vec![Play::Gate], rests(request)].concat();
    let set = |options: &mut atom_serve::ServerOptions| (options.admin, options.drain) = (true, DRAIN);
    let mut site = Site::start_with(script, set).await;
    let mut running = site.client().await;
    running.send("POST", "/v1/completions", &[JSON], br#"{"prompt": "x"}"#).await;
    while site.fake.taken_now() == 0 {
        tokio::task::yield_now().await;
    }
    site.stop();
    while site.get("/health").await.status != 503 {}
    let refused = site.post("/admin/pause", &json!({})).await;
    assert_eq!((refused.status, &refused.error()["code"]), (409, &json!("pause_overtaken")));
    assert!(!site.fake.is_pausing(), "it was not even tried");
    site.fake.pause();
    site.fake.gate.add_permits(1);
    assert_eq!(running.response().await.status, 200);
    assert_eq!(site.ended().await.cut, 0);
}

#[tokio::test]
async fn a_pause_that_is_overtaken_says_so_at_once() {
    for by in ["another client", "another host", "an exit"] {
        let site = Site::start_with(says("ok"), |options| options.admin = true).await;
        site.fake.busy.store(true, Ordering::SeqCst);
        let mut pausing = site.client().await;
        pausing.send("POST", "/admin/pause", &[JSON], b"{}").await;
        site.fake.paused.subscribe().wait_for(|&paused| paused).await.unwrap();
        match by {
            "another client" => assert_eq!(site.post("/admin/resume", &json!({})).await.status, 200),
            "an exit" => assert_eq!(site.post("/admin/exit", &json!({})).await.status, 200),
            _ => site.fake.resume(),
        }
        // The limit of a pause, 60 s, would be a 504.
        let overtaken = pausing.response().await;
        assert_eq!((overtaken.status, &overtaken.error()["code"]), (409, &json!("pause_overtaken")), "{by}");
        assert!(
            overtaken.error()["message"].as_str().unwrap().contains("a resume or an exit came meanwhile")
        );
    }
}

#[tokio::test]
async fn an_order_with_fields_is_refused_and_not_carried_out() {
    let site = Site::start_with(says("ok"), |options| options.admin = true).await;
    let bodies = [
        ("[]", "invalid_json", "the body is a list of 0; it must be a JSON object"),
        ("null", "invalid_json", "the body is null; it must be a JSON object"),
        ("{", "invalid_json", "not valid JSON"),
        (r#"{"seconds": 5}"#, "unknown_field", "unknown field 'seconds'"),
        (r#"{"lane": null}"#, "unknown_field", "unknown field 'lane'"),
    ];
    for order in ["pause", "resume", "drain", "exit"] {
        for (body, code, reason) in bodies {
            let mut client = site.client().await;
            client.send("POST", &format!("/admin/{order}"), &[JSON], body.as_bytes()).await;
            let refused = client.response().await;
            assert_eq!((refused.status, &refused.error()["code"]), (400, &json!(code)), "{order} {body}");
            let error = refused.error();
            assert!(error["message"].as_str().unwrap().contains(reason), "{order} {body}: {error}");
        }
        assert!(!site.fake.is_pausing() && !site.fake.drained.load(Ordering::SeqCst));
    }
    assert_eq!(site.get("/health").await.status, 200);
    for body in ["", "{}", " { } "] {
        let mut client = site.client().await;
        client.send("POST", "/admin/pause", &[JSON], body.as_bytes()).await;
        assert_eq!(client.response().await.status, 200, "{body:?}");
    }
}

#[tokio::test]
async fn orders_need_the_flag_and_a_json_body() {
    let site = Site::start(says("ok")).await;
    assert_eq!(site.post("/admin/pause", &json!({})).await.status, 404);
    let site = Site::start_with(says("ok"), |options| options.admin = true).await;
    let mut page = site.client().await;
    page.send("POST", "/admin/exit", &[("content-type", "text/plain")], b"{}").await;
    assert_eq!(page.response().await.status, 415);
    assert_eq!(site.get("/admin/pause").await.status, 405);
}

#[tokio::test]
async fn equal_session_ids_are_equal_sessions() {
    let site = Site::start(says("ok")).await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}]}).to_string();
    for session in ["a", "a", "b", ""] {
        let mut client = site.client().await;
        let headers = [JSON, ("x-session-id", session)];
        client.send("POST", "/v1/chat/completions", &headers, body.as_bytes()).await;
        assert_eq!(client.response().await.status, 200);
    }
    let taken = site.fake.taken.lock().unwrap();
    let sessions: Vec<_> = taken.iter().map(|request| request.session).collect();
    assert!(sessions[0].is_some() && sessions[0] == sessions[1] && sessions[1] != sessions[2]);
    assert_eq!(sessions[3], None);
}
