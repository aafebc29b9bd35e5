//! Orders to the engine over HTTP.

use crate::client::JSON;
use crate::fake::{Site, says};
use serde_json::json;
use std::sync::atomic::Ordering;

#[tokio::test]
async fn pause_and_resume_reach_the_engine() {
    let site = Site::start_with(says("ok"), |options| options.admin = true).await;
    let paused = site.post("/admin/pause", &json!({})).await;
    assert_eq!((paused.status, &paused.json()["paused"]), (200, &json!(true)));
    assert!(site.fake.paused.load(Ordering::SeqCst));
    let resumed = site.post("/admin/resume", &json!({})).await;
    assert_eq!((resumed.status, &resumed.json()["paused"]), (200, &json!(false)));
    assert!(!site.fake.paused.load(Ordering::SeqCst));
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
    assert!(!site.fake.paused.load(Ordering::SeqCst), "what was taken is answered");
    assert_eq!(site.ended().await.cut, 0);
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
