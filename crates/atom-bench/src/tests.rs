//! Whole benches against a server in this process.

use crate::fake_server::{Answer, Completion, FakeServer, ids, prompt, right};
use crate::*;
use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::sync::{Barrier, Mutex};
use std::time::Duration;
use tokio::sync::oneshot;

/// Requests of a bench before its first measured one, without warm-up: those that calibrate.
const PROBES: usize = 2;
const SOAK_SEATS: usize = 3;

fn options(url: &str) -> BenchOptions {
    BenchOptions {
        target: Target::parse(url).unwrap(),
        api_key: None,
        model: None,
        endpoint: Endpoint::Completions,
        prompts: PromptKind::Words,
        shape: Shape { input_tokens: 43, output_tokens: 5, shared_prefix_tokens: 0 },
        ignore_eos: false,
        temperature: 0.0,
        seed: 1,
        warmup: 0,
        timeout: Duration::from_secs(60),
        load: levels(&[2], 10),
    }
}

fn levels(concurrencies: &[usize], requests: usize) -> Load {
    Load::Levels { concurrencies: concurrencies.into(), requests: Some(requests) }
}

async fn run_whole(options: BenchOptions) -> Report {
    run(options, |_| {}, pending()).await.unwrap()
}

fn failures(report: &Report) -> BTreeMap<&str, usize> {
    report.levels.iter().flat_map(|level| &level.failures).map(|f| (f.kind.as_str(), f.count)).collect()
}

#[tokio::test]
async fn levels_count_what_the_server_did() {
    let server = FakeServer::start(|_, body| Answer::Whole(right(body))).await;
    let report =
        run_whole(BenchOptions { warmup: 3, load: levels(&[1, 4], 12), ..options(&server.url) }).await;
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.model.as_str(), report.levels.len()), ("tiny", 2));
    for level in &report.levels {
        assert_eq!((level.completed, level.failed, level.unsent), (12, 0, 0));
        // (43 - 3) / 2 = 20 words of two tokens, and the template's three.
        assert_eq!((level.prompt_tokens, level.cached_tokens, level.output_tokens), (12 * 43, 12, 12 * 5));
        assert!(level.output_tokens_per_s > 0.0 && level.duration_s > 0.0);
        let (ttft, e2e) = (level.ttft_ms.unwrap(), level.e2e_ms.unwrap());
        assert!(ttft.p50 <= ttft.p99 && ttft.p50 <= e2e.max && level.itl_ms.is_some());
    }
    let bodies = server.bodies();
    assert_eq!(bodies.len(), PROBES + 3 + 24);
    let measured: BTreeSet<&str> = bodies[PROBES..].iter().map(prompt).collect();
    assert_eq!(measured.len(), 3 + 24, "a prompt came twice");
    let body = &bodies[PROBES];
    assert_eq!((body["max_tokens"].as_u64(), body["model"].as_str()), (Some(5), Some("tiny")));
    assert_eq!(body["stream_options"]["include_usage"], true);
    assert!(body.get("ignore_eos").is_none() && body.get("seed").is_none());
    // One each for the model, the first requests, and every seat of both levels.
    assert_eq!(server.connections(), 1 + 1 + 1 + 4);

    let table = report.to_string();
    for part in ["concurrency", "TTFT ms", "p99", "output tokens/s"] {
        assert!(table.contains(part), "{table}");
    }
    let json: serde_json::Value = serde_json::from_str(&report.to_json()).unwrap();
    assert_eq!(json["levels"][1]["concurrency"], 4);
    assert_eq!(json["levels"][1]["output_tokens"], 60);
    assert!(json["levels"][0]["ttft_ms"]["p90"].is_number());
}

// A blocked answer holds a thread of the runtime: more of them than answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 8)]
async fn as_many_requests_are_in_flight_as_asked() {
    // No answer before all six are there: with fewer in flight the requests would time out.
    let arrived = Barrier::new(6);
    let server = FakeServer::start(move |number, body| {
        if number >= PROBES {
            arrived.wait();
        }
        Answer::Whole(right(body))
    })
    .await;
    let report = run_whole(BenchOptions { load: levels(&[6], 12), ..options(&server.url) }).await;
    assert_eq!(report.levels[0].completed, 12, "{report}");
}

#[tokio::test]
async fn chat_sends_messages_and_the_options_that_were_asked_for() {
    let server = FakeServer::start(|_, body| Answer::Whole(right(body))).await;
    let report = run_whole(BenchOptions {
        endpoint: Endpoint::Chat,
        model: Some("mine".into()),
        ignore_eos: true,
        temperature: 0.5,
        shape: Shape { input_tokens: 83, output_tokens: 4, shared_prefix_tokens: 60 },
        ..options(&server.url)
    })
    .await;
    assert!(report.is_clean(), "{report}");
    let bodies = server.bodies();
    let measured = &bodies[PROBES..];
    let seeds: BTreeSet<u64> = measured.iter().map(|body| body["seed"].as_u64().unwrap()).collect();
    assert_eq!(seeds.len(), 10);
    let words = |body| prompt(body).split(' ').map(str::to_owned).collect::<Vec<_>>();
    let first = words(&measured[0]);
    assert_eq!(first.len(), 40);
    for body in measured {
        assert_eq!(body["messages"][0]["role"], "user");
        assert_eq!((body["model"].as_str(), &body["ignore_eos"]), (Some("mine"), &true.into()));
        assert_eq!(words(body)[..30], first[..30], "60 tokens are 30 words");
    }
    assert_ne!(words(&measured[1])[30..], first[30..]);
}

#[tokio::test]
async fn random_ids_are_sent_as_ids_and_differ_in_every_request() {
    let server = FakeServer::start(|_, body| Answer::Whole(right(body))).await;
    let shape = Shape { input_tokens: 37, output_tokens: 3, shared_prefix_tokens: 10 };
    let prompts = PromptKind::Ids { vocabulary: 5000 };
    let report = run_whole(BenchOptions { prompts, shape, warmup: 1, ..options(&server.url) }).await;
    assert!(report.is_clean() && report.notes.is_empty(), "{report}");
    let sent: Vec<_> = server.bodies().iter().map(|body| ids(body).unwrap()).collect();
    // One that looks whether the server counts alike, and one that warms up.
    assert_eq!(sent.len(), 2 + 10);
    assert!(sent.iter().all(|ids| ids.len() == 37 && ids.iter().all(|&id| id < 5000)));
    let own: BTreeSet<_> = sent.iter().map(|ids| ids[10..].to_vec()).collect();
    assert_eq!(own.len(), sent.len());
    assert!(
        sent[1..].iter().all(|ids| ids[..10] == sent[1][..10]),
        "the probe comes before the prefix is known"
    );
    assert!(sent.iter().flatten().any(|&id| id > 4000));
}

#[tokio::test]
async fn a_server_that_adds_to_ids_is_noted_and_ids_that_cant_be_sent_are_refused() {
    let adds = |_, body: &serde_json::Value| {
        let answer = right(body);
        let usage = answer.usage.map(|(prompt, cached, tokens)| (prompt + 1, cached, tokens));
        Answer::Whole(Completion { usage, ..answer })
    };
    let server = FakeServer::start(adds).await;
    let ids = |vocabulary| BenchOptions { prompts: PromptKind::Ids { vocabulary }, ..options(&server.url) };
    let report = run_whole(ids(100)).await;
    assert_eq!(report.notes, ["the server counts 44 tokens where 43 ids were sent"]);
    for (options, part) in [
        (BenchOptions { endpoint: Endpoint::Chat, ..ids(100) }, "--endpoint completions"),
        (ids(0), "1 token or more"),
    ] {
        let error = run(options, |_| {}, pending()).await.unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[tokio::test]
async fn failures_are_counted_by_kind_and_the_rest_is_measured() {
    let some = || vec![" a".to_owned(), " b".to_owned()];
    let server = FakeServer::start(move |number, body| match number.checked_sub(PROBES) {
        Some(0) => Answer::Status(503, "overloaded"),
        Some(2) => Answer::CutOff(some()),
        Some(4) => Answer::ErrorInStream(some(), "out of pages"),
        Some(6) => Answer::NoStream,
        Some(8) => Answer::Status(503, "again"),
        _ => Answer::Whole(right(body)),
    })
    .await;
    let report = run_whole(BenchOptions { load: levels(&[1], 12), ..options(&server.url) }).await;
    assert!(!report.is_clean());
    assert_eq!((report.levels[0].completed, report.levels[0].failed), (7, 5));
    assert_eq!(
        failures(&report),
        BTreeMap::from([
            ("HTTP 503", 2),
            ("closed before the end", 1),
            ("error in the stream", 1),
            ("not a stream of completions", 1),
        ])
    );
    let table = report.to_string();
    assert!(table.contains("2 x HTTP 503; the first: overloaded"), "{table}");
    assert!(table.contains("out of pages"), "{table}");
}

#[tokio::test]
async fn a_server_that_dies_ends_the_bench() {
    let server =
        FakeServer::start(
            |number, body| {
                if number < PROBES + 7 { Answer::Whole(right(body)) } else { Answer::Die }
            },
        )
        .await;
    let report = run_whole(BenchOptions { load: levels(&[2, 3, 4], 500), ..options(&server.url) }).await;
    assert!(!report.is_clean());
    let first = &report.levels[0];
    // Those that were being answered when it died may be lost.
    assert!((5..=7).contains(&first.completed), "{report}");
    assert!(first.failed >= 2 && first.unsent > 400, "{report}");
    assert_eq!(first.completed + first.failed + first.unsent, 500);
    assert!(report.levels[1].completed == 0 && report.levels.len() == 2, "{report}");
    assert!(report.notes.iter().any(|note| note.contains("1 further levels were left out")), "{report}");
}

#[tokio::test]
async fn a_server_that_closes_idle_connections_is_no_failure() {
    let server =
        FakeServer::start(|_, body| Answer::Whole(Completion { hangs_up: true, ..right(body) })).await;
    let report = run_whole(options(&server.url)).await;
    assert!(report.is_clean(), "{report}");
    assert!(server.connections() >= 10);
}

#[tokio::test]
async fn without_usage_pieces_are_counted_and_the_report_says_so() {
    let server = FakeServer::start(|_, body| Answer::Whole(Completion { usage: None, ..right(body) })).await;
    let report = run_whole(options(&server.url)).await;
    assert_eq!(report.levels[0].output_tokens, 50);
    let notes = report.notes.join("\n");
    assert!(notes.contains("a word is taken for a token"), "{notes}");
    assert!(notes.contains("10 answers came without usage"), "{notes}");
    assert_eq!(prompt(&server.bodies()[PROBES]).split(' ').count(), 43);
}

#[tokio::test]
async fn answers_that_end_early_are_noted() {
    let server = FakeServer::start(|_, body| {
        let mut short = right(body);
        short.usage = Some((43, 0, 3));
        Answer::Whole(short)
    })
    .await;
    let report = run_whole(options(&server.url)).await;
    assert!(report.is_clean());
    assert!(report.notes.iter().any(|note| note.contains("10 answers") && note.contains("--ignore-eos")));
}

#[tokio::test]
async fn a_request_that_takes_too_long_is_a_timeout() {
    let server =
        FakeServer::start(
            |number, body| {
                if number == PROBES + 1 { Answer::Hang } else { Answer::Whole(right(body)) }
            },
        )
        .await;
    let timeout = Duration::from_secs(1);
    let report = run_whole(BenchOptions { timeout, load: levels(&[1], 4), ..options(&server.url) }).await;
    assert_eq!(failures(&report), BTreeMap::from([("timeout", 1)]));
    assert_eq!(report.levels[0].completed, 3);
}

#[tokio::test]
async fn stopping_reports_what_was_done_until_then() {
    let (reached, stop) = oneshot::channel();
    let reached = Mutex::new(Some(reached));
    let server = FakeServer::start(move |number, body| {
        if number < PROBES + 4 {
            return Answer::Whole(right(body));
        }
        if let Some(reached) = reached.lock().unwrap().take() {
            reached.send(()).unwrap();
        }
        Answer::Hang
    })
    .await;
    let options = BenchOptions { load: levels(&[1, 2], 10), ..options(&server.url) };
    let report = run(options, |_| {}, async { stop.await.unwrap() }).await.unwrap();
    assert!(report.interrupted && !report.is_clean());
    assert_eq!(report.levels.len(), 1);
    let level = &report.levels[0];
    assert_eq!((level.completed, level.unsent), (4, 5));
    assert_eq!(failures(&report), BTreeMap::from([("interrupted", 1)]));
}

#[tokio::test]
async fn a_server_that_does_not_serve_is_an_error_with_its_reason() {
    let refused = |options| async { run(options, |_| {}, pending()).await.unwrap_err().to_string() };
    let message = refused(options("http://127.0.0.1:1")).await;
    assert!(message.contains("GET /v1/models failed: no connection"), "{message}");
    for (models, part) in [("", "HTTP 404"), (r#"{"data": []}"#, "is empty"), ("<html>", "no list of models")]
    {
        let server = FakeServer::start_with_models(models, |_, _| Answer::Hang).await;
        let message = refused(options(&server.url)).await;
        assert!(message.contains(part), "{message}");
    }
    let server = FakeServer::start(|_, _| Answer::Status(400, "prompt too long")).await;
    let message = refused(options(&server.url)).await;
    assert!(message.contains("the first request failed: HTTP 400: prompt too long"), "{message}");
    let server = FakeServer::start(|number, body| {
        if number < PROBES { Answer::Whole(right(body)) } else { Answer::Status(500, "no") }
    })
    .await;
    let message = refused(BenchOptions { warmup: 1, ..options(&server.url) }).await;
    assert!(message.contains("a warm-up request failed: HTTP 500"), "{message}");
    let shape = Shape { input_tokens: 5, output_tokens: 5, shared_prefix_tokens: 6 };
    let message = refused(BenchOptions { shape, ..options(&server.url) }).await;
    assert!(message.contains("--shared-prefix 6 is longer than --input-len 5"), "{message}");
}

/// Runs a soak until the server has answered `requests` and every seat waits for another answer;
/// the clock plays no part.
async fn soak(
    requests: usize,
    answer: impl Fn(usize, &serde_json::Value) -> Answer + Send + Sync + 'static,
) -> (Report, Vec<serde_json::Value>) {
    let (reached, stop) = oneshot::channel();
    let reached = Mutex::new(Some(reached));
    let server = FakeServer::start(move |number, body| {
        if number >= PROBES + requests {
            if number + 1 == PROBES + requests + SOAK_SEATS {
                reached.lock().unwrap().take().unwrap().send(()).unwrap();
            }
            return Answer::Hang;
        }
        answer(number.saturating_sub(PROBES), body)
    })
    .await;
    let load = Load::Soak { concurrency: SOAK_SEATS, duration: Duration::from_secs(3600) };
    let options = BenchOptions { load, ..options(&server.url) };
    let report = run(options, |_| {}, async { stop.await.unwrap() }).await.unwrap();
    (report, server.bodies().split_off(PROBES))
}

#[tokio::test]
async fn a_soak_repeats_requests_of_all_lengths_and_finds_them_equal() {
    let (report, bodies) = soak(120, |_, body| Answer::Whole(right(body))).await;
    let checked = report.soak.unwrap();
    assert_eq!(checked.cases, 9);
    assert_eq!(checked.equal, 120 - 9, "{report}");
    assert_eq!(failures(&report).keys().copied().collect::<Vec<_>>(), ["interrupted"]);
    let distinct =
        |field: &str| bodies.iter().map(|body| body[field].to_string()).collect::<BTreeSet<_>>().len();
    assert_eq!(distinct("prompt"), 9);
    assert!(distinct("max_tokens") > 2 && distinct("seed") == 5, "four seeds, and none for greedy");
    assert!(bodies.iter().all(|body| body["ignore_eos"] == true));
}

#[tokio::test]
async fn a_soak_notices_text_that_changes_and_tokens_that_are_missing() {
    let (report, _) = soak(60, |number, body| {
        let mut answer = right(body);
        if number == 50 {
            answer.pieces[0].push('!');
        }
        if number == 55 {
            answer.usage = answer.usage.map(|(prompt, cached, tokens)| (prompt, cached, tokens + 1));
        }
        Answer::Whole(answer)
    })
    .await;
    let found = failures(&report);
    assert_eq!((found["other text than before"], found["wrong number of tokens"]), (1, 1), "{report}");
    assert!(!report.is_clean());
    let (report, _) = soak(5, |_, body| Answer::Whole(Completion { usage: None, ..right(body) })).await;
    assert!(report.to_string().contains("sends no usage"), "{report}");
}
