//! By which names a server without keys may be asked.

use crate::fake::{Site, says};
use atom_serve::{AllowedHosts, ApiKeys, CorsOrigins};
use serde_json::json;
use std::sync::Arc;

/// The status of a request with these headers, `host` among them.
async fn ask(site: &Site, headers: &str) -> u16 {
    let mut client = site.client().await;
    client.write(format!("GET /v1/models HTTP/1.1\r\n{headers}\r\n").as_bytes()).await;
    client.response().await.status
}

#[tokio::test]
async fn a_name_that_was_rebound_to_this_machine_is_refused() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    let body = json!({"prompt": "x"}).to_string();
    let length = body.len();
    client
        .write(
            format!(
                "POST /v1/completions HTTP/1.1\r\nhost: evil.example:8000\r\norigin: http://evil.example:8000\r\n\
                 content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
            )
            .as_bytes(),
        )
        .await;
    let response = client.response().await;
    assert_eq!((response.status, &response.error()["code"]), (403, &json!("host_not_allowed")));
    let text = response.text();
    assert!(text.contains("evil.example:8000") && text.contains("--allowed-host"), "{text}");
    assert_eq!(site.fake.taken_now(), 0);
    for (headers, status) in [
        ("host: evil.example\r\n", 403),
        ("host: localhost\r\nhost: evil.example\r\n", 400),
        ("host: localhost.evil.example\r\n", 403),
        ("host: localhost:80@evil.example\r\n", 403),
        ("host: [::1].evil.example\r\n", 403),
        ("host:\r\n", 403),
    ] {
        assert_eq!(ask(&site, headers).await, status, "{headers}");
    }
    // The page, too: its scripts would be of the page's own origin.
    let mut client = site.client().await;
    client.write(b"GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n").await;
    assert_eq!(client.response().await.status, 403);
    let mut client = site.client().await;
    client.write(b"GET http://evil.example/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert_eq!(client.response().await.status, 403);
    // Whoever asks whether the server is well, such as an orchestrator, may call it what it likes.
    let mut client = site.client().await;
    client.write(b"GET /health HTTP/1.1\r\nhost: evil.example\r\n\r\n").await;
    assert_eq!(client.response().await.status, 200);
}

#[tokio::test]
async fn users_and_proxies_of_this_machine_are_served() {
    let site = Site::start(says("ok")).await;
    let port = site.address.port();
    for headers in [
        String::new(),
        format!(
            "host: localhost:{port}\r\norigin: http://localhost:{port}\r\nsec-fetch-site: same-origin\r\n"
        ),
        format!("host: {}\r\n", site.address),
        "host: [::1]:8000\r\n".into(),
        "host: 10.1.2.3\r\n".into(),
        "host: app.localhost\r\n".into(),
        "host: host.docker.internal:8000\r\n".into(),
        // Behind a proxy that says its own target, as nginx does: the page and what it asks have one public name.
        "host: 127.0.0.1:8000\r\norigin: https://chat.example\r\nsec-fetch-site: same-origin\r\n".into(),
        // A page of a program on this machine.
        "host: localhost\r\norigin: http://127.0.0.1:3000\r\nsec-fetch-site: cross-site\r\n".into(),
        // Not of a page.
        "host: localhost\r\nsec-fetch-site: cross-site\r\nsec-fetch-mode: navigate\r\n".into(),
    ] {
        assert_eq!(ask(&site, &headers).await, 200, "{headers}");
    }
    let mut old = site.client().await;
    old.write(b"GET /v1/models HTTP/1.0\r\n\r\n").await;
    assert_eq!(old.response().await.status, 200);
}

#[tokio::test]
async fn a_page_of_another_site_is_refused_unless_it_is_allowed() {
    let page = "host: localhost\r\norigin: https://a.example\r\nsec-fetch-site: cross-site\r\n";
    let closed = Site::start(says("ok")).await;
    assert_eq!(ask(&closed, page).await, 403);
    assert_eq!(ask(&closed, &page.replace("https://a.example", "null")).await, 403);
    for origins in ["https://a.example", "*"] {
        let open = |options: &mut atom_serve::ServerOptions| {
            options.cors = CorsOrigins::new([origins]).unwrap();
        };
        let site = Site::start_with(says("ok"), open).await;
        assert_eq!(ask(&site, page).await, 200, "{origins}");
    }
}

#[tokio::test]
async fn names_are_nobodys_business_where_something_else_protects_the_server_or_nothing_does() {
    let public = "host: llm.example.com\r\n";
    let named = |options: &mut atom_serve::ServerOptions| {
        options.hosts = AllowedHosts::new(["llm.example.com"]).unwrap();
    };
    let site = Site::start_with(says("ok"), named).await;
    assert_eq!((ask(&site, public).await, ask(&site, "host: other.example\r\n").await), (200, 403));
    let any = |options: &mut atom_serve::ServerOptions| options.hosts = AllowedHosts::new(["*"]).unwrap();
    assert_eq!(ask(&Site::start_with(says("ok"), any).await, public).await, 200);
    // Whoever listens on all addresses is reached by names that nobody here knows.
    let everywhere = Site::listen("0.0.0.0:0", says("ok"), |_| {}).await;
    assert_eq!(ask(&everywhere, public).await, 200);
    let locked = Site::start_with(says("ok"), |options| {
        options.api_keys = Arc::new(ApiKeys::new(["sk-one"]).unwrap());
    })
    .await;
    let mut client = locked.client().await;
    client.write(b"GET /v1/models HTTP/1.1\r\nhost: llm.example.com\r\nx-api-key: sk-one\r\n\r\n").await;
    assert_eq!(client.response().await.status, 200);
}
