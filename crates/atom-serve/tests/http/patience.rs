//! Clients that keep the server waiting, and requests that take too long. Time is the test's.

use crate::client::{Client, JSON};
use crate::fake::{Play, Site, answer, bytes, scored};
use atom_engine::{Event, Request};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::net::TcpSocket;
use tokio::time::{Instant, sleep};

const PLAIN: &str = "/v1/completions";

/// Begins an answer that never ends.
fn endless(request: &Request) -> Vec<Play> {
    let mut plays = answer(request, &bytes("ab"));
    plays.pop();
    plays
}

fn body(stream: bool) -> Value {
    json!({"prompt": "x", "stream": stream})
}

#[tokio::test(start_paused = true)]
async fn a_head_that_does_not_end_is_a_408_and_a_connection_that_idles_closes() {
    let site = Site::start_with(endless, |options| options.idle_timeout = Duration::from_secs(7)).await;
    let mut client = site.client().await;
    client.write(b"GET /health HT").await;
    let response = client.response().await;
    assert_eq!((response.status, &response.error()["code"]), (408, &json!("headers_timeout")));
    assert!(response.text().contains("7 seconds") && response.header("x-request-id").is_some());
    assert!(client.is_closed().await);

    // A byte now and then doesn't help.
    let mut client = site.client().await;
    for byte in b"GET /" {
        client.write(&[*byte]).await;
        sleep(Duration::from_secs(2)).await;
    }
    assert_eq!(client.response().await.status, 408);

    let mut fresh = site.client().await;
    let mut used = site.client().await;
    assert_eq!(used.get("/health").await.status, 200);
    assert_eq!((fresh.rest().await, used.rest().await), (String::new(), String::new()));
}

#[tokio::test(start_paused = true)]
async fn a_body_that_trickles_is_a_408() {
    let site = Site::start(endless).await;
    let mut client = site.client().await;
    client
        .write(b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 5000000\r\n\r\n")
        .await;
    // Never 30 seconds without a byte.
    for _ in 0..6 {
        client.write(&[b' '; 1000]).await;
        sleep(Duration::from_secs(8)).await;
    }
    let response = client.response().await;
    assert_eq!((response.status, &response.error()["code"]), (408, &json!("body_timeout")));
    assert!(response.text().contains("at least 1024 a second"), "{}", response.text());
    assert_eq!(site.fake.taken_now(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_takes_too_long_is_ended_whole_or_streamed() {
    let site =
        Site::start_with(endless, |options| options.request_timeout = Some(Duration::from_secs(40))).await;
    let began = Instant::now();
    let whole = site.post(PLAIN, &body(false)).await;
    assert_eq!((whole.status, &whole.error()["code"]), (504, &json!("request_timeout")));
    assert!(whole.text().contains("within 40 seconds"), "{}", whole.text());
    assert!(began.elapsed() >= Duration::from_secs(40));
    site.fake.aborted(1).await;

    let stream = site.post(PLAIN, &body(true)).await;
    let events = stream.events();
    let last: Value = serde_json::from_str(events[events.len() - 1]).unwrap();
    assert_eq!(last["error"]["code"], "request_timeout");
    assert!(events.len() > 1, "the text that there was has been sent");
    site.fake.aborted(2).await;
}

#[tokio::test(start_paused = true)]
async fn waiting_for_the_model_is_not_idling() {
    let site = Site::start_with(
        |request| {
            let mut plays = answer(request, &bytes("ab"));
            plays.insert(1, Play::Gate);
            plays
        },
        |options| options.idle_timeout = Duration::from_secs(5),
    )
    .await;
    for stream in [false, true] {
        let mut client = site.client().await;
        client.send("POST", PLAIN, &[JSON], body(stream).to_string().as_bytes()).await;
        sleep(Duration::from_secs(3600)).await;
        site.fake.gate.add_permits(1);
        assert_eq!(client.response().await.status, 200);
    }
}

/// Hundreds of tokens with twenty alternatives each, for every choice: megabytes.
fn wordy(request: &Request) -> Vec<Play> {
    (0..400).map(|_| Play::Say(Event::Token(scored(97, request.sampling.logprobs)))).collect()
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_takes_nothing_is_dropped_and_its_request_aborted() {
    for stream in [true, false] {
        let site = Site::start_with(
            move |request| {
                let mut plays = wordy(request);
                if !stream {
                    plays.push(Play::Say(Event::Finished(atom_base::FinishReason::Length)));
                }
                plays
            },
            |options| options.idle_timeout = Duration::from_secs(20),
        )
        .await;
        let socket = TcpSocket::new_v4().unwrap();
        // Less than an answer has, whatever the system makes of it.
        socket.set_recv_buffer_size(4096).unwrap();
        let mut client = Client::over(socket.connect(site.address).await.unwrap());
        let choices = 80;
        let body = json!({"prompt": "x", "stream": stream, "n": choices, "logprobs": 20, "max_tokens": 400});
        client.send("POST", PLAIN, &[JSON], body.to_string().as_bytes()).await;
        // Time goes on only when nobody has anything to do.
        sleep(Duration::from_secs(60)).await;
        if stream {
            assert_eq!(site.fake.aborted_now(), choices);
        }
        let metrics = site.get("/metrics").await;
        assert!(metrics.text().contains("atom_num_requests_in_flight 0\n"), "nothing of it is left");
        let rest = client.rest().await;
        assert!(!rest.ends_with("[DONE]\n\n") && !rest.ends_with('}'), "{} bytes came", rest.len());
    }
}
