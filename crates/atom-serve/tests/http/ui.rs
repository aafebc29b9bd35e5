//! The page: its files, what goes with them, and the stream of steps that it draws.

use crate::client::{Client, Response};
use crate::fake::{Site, says};
use atom_base::{LaneId, StepNo};
use atom_serve::{Condition, LaneHealth, LaneStep};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

const FILES: [(&str, &str); 5] = [
    ("/", "text/html; charset=utf-8"),
    ("/ui/atom.css", "text/css; charset=utf-8"),
    ("/ui/atom.js", "text/javascript; charset=utf-8"),
    ("/ui/theme.js", "text/javascript; charset=utf-8"),
    ("/ui/favicon.svg", "image/svg+xml"),
];

/// Every file that the page and its scripts name, and what they name, starting at `/`.
async fn files(client: &mut Client) -> BTreeSet<String> {
    let mut found = BTreeSet::from(["/".to_owned()]);
    let mut open = vec!["/".to_owned()];
    while let Some(path) = open.pop() {
        let file = client.get(&path).await;
        assert_eq!(file.status, 200, "{path}");
        for quoted in file.text().split('"').skip(1).step_by(2) {
            let name = quoted.strip_prefix("./").or(quoted.strip_prefix("ui/")).unwrap_or_default();
            let is_file = [".js", ".css", ".svg"].iter().any(|kind| name.ends_with(kind));
            if is_file && found.insert(format!("/ui/{name}")) {
                open.push(format!("/ui/{name}"));
            }
        }
    }
    found
}

#[tokio::test]
async fn every_file_of_the_page_is_served_with_its_type_and_a_strict_policy() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    for (path, kind) in FILES {
        assert_eq!(client.get(path).await.header("content-type"), Some(kind), "{path}");
    }
    let files = files(&mut client).await;
    assert!(files.len() >= 10 && FILES.iter().all(|(path, _)| files.contains(*path)), "{files:?}");
    for path in &files {
        let file = client.get(path).await;
        for (name, value) in [
            ("x-content-type-options", "nosniff"),
            ("cache-control", "no-cache"),
            ("referrer-policy", "no-referrer"),
        ] {
            assert_eq!(file.header(name), Some(value), "{path}");
        }
        let policy = file.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'"), "{policy}");
        assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
        // Nothing of another host; links that a model writes are checked where they are made.
        let namespace = "http://www.w3.org/2000/svg";
        let text = file.text().replace(namespace, "").replace("https?:\\/\\/", "");
        assert!(!text.contains("http://") && !text.contains("https://"), "{path}");
        // What a model says is text, never markup.
        for word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
            assert!(!text.contains(word), "{path} has {word}");
        }
        assert!(!text.contains(" style=\"") && !text.contains("onclick="), "{path}: the policy forbids it");
    }
}

#[tokio::test]
async fn a_browser_that_has_a_file_is_not_sent_it_again() {
    let site = Site::start(says("ok")).await;
    let mut client = site.client().await;
    let mut tags = BTreeSet::new();
    for path in files(&mut client).await {
        let file = client.get(&path).await;
        let tag = file.header("etag").unwrap().to_owned();
        for (sent, status) in [
            (tag.clone(), 304),
            (format!("W/{tag}"), 304),
            (format!("\"other\", {tag}"), 304),
            ("*".to_owned(), 304),
            ("\"other\"".to_owned(), 200),
            (tag.trim_matches('"').to_owned(), 200),
        ] {
            client.send("GET", &path, &[("if-none-match", &sent)], b"").await;
            let head = client.head().await;
            assert_eq!(head.status, status, "{path} {sent}");
            assert_eq!(head.header("etag"), Some(tag.as_str()));
            assert!(head.header("content-security-policy").is_some());
            if status == 200 {
                client = site.client().await;
            }
        }
        assert!(tags.insert(tag), "{path}: two files of one tag");
    }
}

#[tokio::test]
async fn without_the_page_its_paths_are_like_any_unknown_one() {
    let site = Site::start_with(says("ok"), |options| options.ui = false).await;
    for path in ["/", "/ui/atom.js", "/ui/favicon.svg", "/debug/steps"] {
        let missing = site.get(path).await;
        assert_eq!((missing.status, &missing.error()["code"]), (404, &json!("unknown_url")), "{path}");
    }
    let site = Site::start(says("ok")).await;
    assert_eq!(site.get("/ui/nothing.js").await.status, 404);
    assert_eq!(site.post("/", &json!({})).await.status, 405);
}

fn step(lane: u16, number: u64) -> LaneStep {
    LaneStep {
        lane: LaneId(lane),
        number,
        step: StepNo(number + 10),
        bucket_rows: 8,
        decode_rows: 3,
        ..LaneStep::default()
    }
}

fn lane(number: u16, doing: &str) -> LaneHealth {
    LaneHealth {
        lane: LaneId(number),
        doing: doing.into(),
        since: Duration::from_millis(5),
        condition: Condition::Ready,
    }
}

async fn watch(site: &Site) -> (Client, Response) {
    let mut client = site.client().await;
    client.send("GET", "/debug/steps", &[], b"").await;
    let head = client.head().await;
    (client, head)
}

/// The next frame, without comments.
async fn frame(client: &mut Client) -> Value {
    loop {
        let chunk = String::from_utf8(client.chunk().await.unwrap()).unwrap();
        if chunk.starts_with(':') {
            continue;
        }
        let text = chunk.strip_prefix("data: ").and_then(|rest| rest.strip_suffix("\n\n")).unwrap();
        return serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    }
}

/// Lane and number of each step of a frame.
fn numbers(frame: &Value) -> Vec<(u64, u64)> {
    let steps = frame["steps"].as_array().unwrap().iter();
    steps.map(|step| (step[0].as_u64().unwrap(), step[2].as_u64().unwrap())).collect()
}

#[tokio::test]
async fn a_viewer_gets_what_is_kept_and_then_each_new_step_once() {
    let site = Site::start(says("ok")).await;
    *site.fake.lanes.lock().unwrap() = vec![lane(2, "parked"), lane(3, "parked")];
    site.fake.steps.lock().unwrap().extend([step(2, 1), step(2, 2), step(3, 1)]);
    let (mut viewer, head) = watch(&site).await;
    assert_eq!((head.status, head.header("cache-control")), (200, Some("no-cache")));
    assert_eq!(head.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let first = frame(&mut viewer).await;
    assert_eq!(numbers(&first), [(2, 1), (2, 2), (3, 1)]);
    let fields: Vec<_> =
        first["fields"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let whole = &first["steps"][0];
    assert_eq!(whole.as_array().unwrap().len(), fields.len());
    for (name, value) in [("lane", 2), ("step", 11), ("bucket_rows", 8), ("decode_rows", 3), ("is_held", 0)] {
        let at = fields.iter().position(|field| *field == name).unwrap();
        assert_eq!(whole[at], value, "{name}");
    }
    assert_eq!(first["lanes"][1], json!({"lane": 3, "doing": "parked", "since_ms": 5}));
    assert_eq!(first["limits"]["max_num_seqs"], 8);

    site.fake.steps.lock().unwrap().extend([step(3, 2), step(2, 9)]);
    let next = frame(&mut viewer).await;
    assert_eq!((numbers(&next), next.get("fields")), (vec![(3, 2), (2, 9)], None));
    *site.fake.lanes.lock().unwrap() = vec![lane(2, "replay"), lane(3, "parked")];
    let next = frame(&mut viewer).await;
    assert_eq!((numbers(&next), &next["lanes"][0]["doing"]), (vec![], &json!("replay")));

    let (mut late, _) = watch(&site).await;
    assert_eq!(numbers(&frame(&mut late).await).len(), 5, "whoever comes later sees the same");
}

/// The clock stands still but for timers, so the first thing that can come is the keep-alive.
#[tokio::test(start_paused = true)]
async fn a_stream_without_news_is_kept_alive() {
    let site = Site::start(says("ok")).await;
    let (mut viewer, _) = watch(&site).await;
    frame(&mut viewer).await;
    for _ in 0..2 {
        assert_eq!(viewer.chunk().await.unwrap(), b": keep-alive\n\n");
    }
}

#[tokio::test]
async fn viewers_are_bounded_and_their_places_come_back() {
    let site = Site::start(says("ok")).await;
    let mut viewers = Vec::new();
    for _ in 0..16 {
        let (viewer, head) = watch(&site).await;
        assert_eq!(head.status, 200);
        viewers.push(viewer);
    }
    let refused = site.get("/debug/steps").await;
    assert_eq!((refused.status, &refused.error()["code"]), (429, &json!("too_many_viewers")));
    assert!(refused.header("retry-after").is_some());
    viewers.clear();
    // The server notices each of them in its own time.
    while watch(&site).await.1.status != 200 {}
}

#[tokio::test]
async fn a_viewer_does_not_hold_up_the_end() {
    let mut site = Site::start(says("ok")).await;
    let (mut viewer, _) = watch(&site).await;
    frame(&mut viewer).await;
    site.stop();
    assert_eq!(site.ended().await.cut, 0);
    while viewer.chunk().await.is_some() {}
}
