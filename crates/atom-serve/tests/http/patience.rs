//! Clients that keep the server waiting, and requests that take too long. Time is the test's.

use crate::client::{Client, JSON};
use crate::fake::{Play, Site, answer, bytes, scored};
use atom_engine::{Event, Request};
use serde_json::{Value, json};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;
use tokio::net::TcpSocket;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, advance, sleep};

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

    // Nor a head that was fine before it, or came with it.
    for before in ["", "GET /health HTTP/1.1\r\n\r\n"] {
        let mut client = site.client().await;
        assert_eq!(client.get("/health").await.status, 200);
        client.write(format!("{before}GET /hea").as_bytes()).await;
        for _ in before.lines().take(1) {
            assert_eq!(client.response().await.status, 200);
        }
        assert_eq!(client.response().await.status, 408, "after {before:?}");
        assert!(client.is_closed().await);
    }

    // Nobody waits for the body of what is refused.
    for (method, path, status) in
        [("POST", "/nothing", 404), ("POST", "/health", 405), ("GET", "/health", 200)]
    {
        let mut client = site.client().await;
        client.write(format!("{method} {path} HTTP/1.1\r\ncontent-length: 9\r\n\r\n").as_bytes()).await;
        assert_eq!(client.response().await.status, status, "{path}");
        assert!(client.is_closed().await);
    }

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
async fn a_body_that_came_fast_and_trickles_at_its_end_is_a_408() {
    let site = Site::start(endless).await;
    let mut client = site.client().await;
    client
        .write(b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 5000000\r\n\r\n")
        .await;
    // At a kilobyte a second, it would have an hour.
    client.write(&vec![b' '; 4_000_000]).await;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(310) {
        client.write(b" ").await;
        sleep(Duration::from_secs(20)).await;
    }
    let response = client.response().await;
    assert_eq!((response.status, &response.error()["code"]), (408, &json!("body_timeout")));
    let text = response.text();
    assert!(text.contains("after 300 seconds") && text.contains("; 40000"), "{text}");
    // Its place in the room for bodies is free again: what is asked now is answered.
    assert_eq!(site.post(PLAIN, &json!({"prompt": 5})).await.status, 400);
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

/// A reader that does not keep up: a whole answer of many megabytes, of which nothing was read but its head.
async fn large_answer(site: &Site) -> (Client, u64) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(128 << 10).unwrap();
    let mut client = Client::over(socket.connect(site.address).await.unwrap());
    let body = json!({"prompt": "x", "n": 60, "logprobs": 20, "max_tokens": 400});
    client.send("POST", PLAIN, &[JSON], body.to_string().as_bytes()).await;
    let head = client.head().await;
    let length: u64 = head.header("content-length").unwrap().parse().unwrap();
    // Much more than both ends' buffers hold.
    assert!(head.status == 200 && length > 6 << 20, "{length} bytes");
    (client, length)
}

/// Ends when its play does.
fn wordy_and_done(request: &Request) -> Vec<Play> {
    let mut plays = wordy(request);
    plays.push(Play::Say(Event::Finished(atom_base::FinishReason::Length)));
    plays
}

/// Keeps time from going on by itself, which it does when a test waits for the network too: work in another thread
/// stops it.
fn hold_clock() -> Sender<()> {
    let (holds, held) = channel::<()>();
    spawn_blocking(move || {
        let _ = held.recv();
    });
    holds
}

/// Reads 64 kB a second until the server closes the connection; how much that was.
async fn read_slowly(client: &mut Client) -> u64 {
    let mut read = 0;
    loop {
        let some = client.some(1 << 18).await;
        if some.is_empty() {
            return read;
        }
        read += some.len() as u64;
        advance(Duration::from_secs(4)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_whole_answer_is_delivered_after_the_drain_to_who_reads_slowly() {
    let mut site = Site::start_with(wordy_and_done, |options| options.drain = Duration::from_secs(600)).await;
    let _clock = hold_clock();
    let (mut client, length) = large_answer(&site).await;
    site.stop();
    let mut read = 0;
    while read < length {
        let some = client.some(1 << 20).await;
        assert!(!some.is_empty(), "cut after {read} of {length} bytes");
        read += some.len() as u64;
        advance(Duration::from_secs(4)).await;
    }
    assert_eq!((read, client.is_closed().await), (length, true));
    assert_eq!(site.ended().await.cut, 0);
}

#[tokio::test(start_paused = true)]
async fn who_reads_nothing_after_the_drain_holds_up_its_end_for_seconds_only() {
    let mut site = Site::start_with(wordy_and_done, |options| options.drain = Duration::from_secs(600)).await;
    let (client, _) = large_answer(&site).await;
    site.stop();
    let began = Instant::now();
    assert_eq!(site.ended().await.cut, 0);
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    drop(client);
}

#[tokio::test(start_paused = true)]
async fn a_slow_reader_of_a_whole_answer_has_the_drains_time_and_no_more() {
    let mut site = Site::start_with(wordy_and_done, |options| options.drain = Duration::from_secs(20)).await;
    let _clock = hold_clock();
    let (mut client, length) = large_answer(&site).await;
    site.stop();
    let read = read_slowly(&mut client).await;
    assert!(read < length, "{read} of {length} bytes");
    site.ended().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_timeout_holds_for_reading_the_answer_too() {
    let limit = |options: &mut atom_serve::ServerOptions| {
        options.request_timeout = Some(Duration::from_secs(40));
        options.idle_timeout = Duration::from_secs(3600);
    };
    // A stream that nobody reads, of a model that has not ended.
    let site = Site::start_with(wordy, limit).await;
    let (choices, began) = (80, Instant::now());
    let mut client = site.client().await;
    let body = json!({"prompt": "x", "stream": true, "n": choices, "logprobs": 20, "max_tokens": 400});
    client.send("POST", PLAIN, &[JSON], body.to_string().as_bytes()).await;
    site.fake.aborted(choices).await;
    assert!((40..60).contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());

    // A whole answer that is read, but too slowly.
    let site = Site::start_with(wordy_and_done, limit).await;
    let _clock = hold_clock();
    let (mut client, length) = large_answer(&site).await;
    let read = read_slowly(&mut client).await;
    assert!(read < length, "{read} of {length} bytes");
}

#[tokio::test(start_paused = true)]
async fn an_answers_time_is_not_the_connections() {
    let site = Site::start_with(
        |request| answer(request, &bytes("ab")),
        |options| options.request_timeout = Some(Duration::from_secs(5)),
    )
    .await;
    let mut client = site.client().await;
    assert_eq!(client.post(PLAIN, &body(false)).await.status, 200);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(client.post(PLAIN, &body(true)).await.status, 200);
    sleep(Duration::from_secs(60)).await;
    client.write(b"NONSENSE\r\n\r\n").await;
    assert_eq!(client.response().await.error()["code"], "invalid_http");
}
