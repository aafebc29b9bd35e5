//! The binary as one group of four ranks: a mixture with random weights, its experts spread over them.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

#[path = "common/model.rs"]
mod model;
#[path = "common/server.rs"]
mod server;

use serde_json::{Value, json};
use server::{Server, mixture_without_weights};

const DEP4: [&str; 7] = [
    "--load-dummy",
    "-tp",
    "4",
    "--enable-dp-attention",
    "--enable-expert-parallel",
    "--enable-admin",
    "--max-model-len=4096",
];

/// DEP4 under load: everybody is answered, every step of every lane is a replay.
#[test]
fn a_mixture_on_four_ranks_replays_every_step_under_load() {
    let folder = mixture_without_weights("load");
    let flags =
        ["--load-dummy", "-tp", "4", "--enable-dp-attention", "--enable-expert-parallel", "--enable-admin"];
    let server = Server::start_model(&folder, &[&flags[..], &["--max-model-len", "512"]].concat());
    std::thread::scope(|scope| {
        for client in 0..24 {
            let server = &server;
            scope.spawn(move || {
                let lane = client % 4;
                let prompt = "x".repeat(1 + client * 13);
                let body =
                    json!({"prompt": prompt, "max_tokens": 40, "data_parallel_rank": lane, "seed": client});
                let (status, text) = server.post("/v1/completions", &body);
                assert_eq!(status, 200, "{text}");
                let answer: Value = serde_json::from_str(&text).unwrap();
                assert_eq!(answer["usage"]["completion_tokens"], 40, "{text}");
            });
        }
    });
    let (status, paused) = server.post("/admin/pause", &json!({}));
    assert_eq!(status, 200, "{paused}");
    let of = |name: &str| server.by_lane(name);
    let replays = of("atom_replays_total");
    assert!(replays.len() == 4 && replays.iter().all(|&n| n == replays[0] && n >= 40.0), "{replays:?}");
    assert_eq!(of("atom_eager_steps_total"), [0.0; 4]);
    // Every row chose two experts in each of two layers, and every choice was computed by one rank.
    let sum = |name: &str| of(name).iter().sum::<f64>();
    assert_eq!(sum("atom_expert_rows_chosen_total"), 4.0 * sum("atom_rows_total"));
    assert_eq!(sum("atom_expert_rows_computed_total"), sum("atom_expert_rows_chosen_total"));
    std::fs::remove_dir_all(folder).unwrap();
}

/// One lane decodes, another gets prompts. With the delayer they wait some steps for those of other lanes,
/// with `ATOM_ENABLE_PREFILL_DELAYER=0` they never do; the answers have the same bits.
#[test]
fn prompts_wait_for_others_unless_the_variable_says_no() {
    let folder = mixture_without_weights("delayer");
    let on = |lane: u32, prompt: &str, max_tokens: u32| {
        json!({"prompt": prompt, "max_tokens": max_tokens, "data_parallel_rank": lane, "ignore_eos": true,
            "temperature": 0.8, "seed": 7, "logprobs": 1})
    };
    let answers = [("1", true), ("0", false), ("off", false)].map(|(variable, holds)| {
        let variables = [("ATOM_ENABLE_PREFILL_DELAYER", variable)];
        let server = Server::start_in(&variables, &folder, &DEP4);
        let running = || server.by_lane("atom_num_requests_running")[0];
        let decoding = server.begin("/v1/completions", &on(0, "decode", 4000));
        let start = std::time::Instant::now();
        while running() == 0.0 {
            assert!(start.elapsed().as_secs() < 60, "it never began");
        }
        let prompts = (1..6).map(|i| server.post("/v1/completions", &on(1, &"x".repeat(50 * i), 4)));
        let texts = prompts.map(|(status, text)| {
            assert_eq!(status, 200, "{text}");
            serde_json::from_str::<Value>(&text).unwrap()["choices"].clone()
        });
        let texts: Vec<Value> = texts.collect();
        assert_eq!(running(), 1.0, "lane 0 has decoded all along");
        drop(decoding);
        assert_eq!(server.post("/admin/pause", &json!({})).0, 200);
        let held = server.by_lane("atom_prefill_held_steps_total");
        assert!(held.iter().all(|&steps| steps == held[0] && (steps > 0.0) == holds), "{variable}: {held:?}");
        assert_eq!(server.metric("atom_eager_steps_total"), 0.0);
        texts
    });
    assert!(answers.iter().all(|texts| *texts == answers[0]), "{answers:?}");
    std::fs::remove_dir_all(folder).unwrap();
}

/// B-82: 64 equal requests at once on 4 lanes, by every rule that deals them. The engine is paused until all
/// are there, so none ends while others come.
#[test]
fn b_82_a_burst_of_64_equal_requests_gives_16_to_each_of_4_lanes() {
    let folder = mixture_without_weights("burst");
    for rule in ["work", "round_robin", "least_requests", "least_tokens"] {
        let server = Server::start_model(&folder, &[&DEP4[..], &["--dp-load-balance", rule]].concat());
        assert_eq!(server.post("/admin/pause", &json!({})).0, 200);
        let waiting = std::thread::scope(|scope| {
            for _ in 0..64 {
                scope.spawn(|| {
                    let body =
                        json!({"prompt": "the same for all of them", "max_tokens": 3, "ignore_eos": true});
                    let (status, text) = server.post("/v1/completions", &body);
                    assert_eq!(status, 200, "{text}");
                });
            }
            let start = std::time::Instant::now();
            let waiting = loop {
                let waiting = server.by_lane("atom_num_requests_waiting");
                if waiting.iter().sum::<f64>() == 64.0 {
                    break waiting;
                }
                assert!(start.elapsed().as_secs() < 60, "{rule}: {waiting:?}");
            };
            assert_eq!(server.post("/admin/resume", &json!({})).0, 200);
            waiting
        });
        assert!(waiting.iter().all(|n| (15.0..=17.0).contains(n)), "{rule}: {waiting:?}");
        assert_eq!(
            server.by_lane("atom_requests_finished_total"),
            waiting,
            "{rule}: each where it was dealt to"
        );
    }
    std::fs::remove_dir_all(folder).unwrap();
}

/// A paused group of two processes, one of which gets SIGTERM: everybody is answered, and both end well.
#[test]
fn a_sigterm_during_a_pause_cuts_nobody_on_any_host() {
    let folder = mixture_without_weights("sigterm");
    let master = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = |node: &'static str| {
        let (master, folder) = (master.clone(), folder.clone());
        std::thread::spawn(move || {
            let hosts = ["--nodes", "2", "--master", &master, "--node-rank", node];
            Server::start_model(&folder, &[&DEP4[..], &hosts].concat())
        })
    };
    let servers = [start("0"), start("1")].map(|server| server.join().unwrap());
    assert_eq!(servers[1].post("/admin/pause", &json!({})).0, 200);
    std::thread::scope(|scope| {
        for server in &servers {
            scope.spawn(|| {
                let body = json!({"prompt": "a question", "max_tokens": 20, "ignore_eos": true});
                let (status, text) = server.post("/v1/completions", &body);
                assert_eq!(status, 200, "{text}");
                let answer: Value = serde_json::from_str(&text).unwrap();
                assert_eq!(answer["usage"]["completion_tokens"], 20, "{text}");
            });
            let start = std::time::Instant::now();
            while server.metric("atom_num_requests_waiting") < 1.0 {
                assert!(start.elapsed().as_secs() < 60, "it never came");
            }
        }
        servers[0].terminate();
    });
    for mut server in servers {
        assert!(server.child.wait().unwrap().success(), "a clean end");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

/// Shares of padding are a histogram for each lane, and causes of eager steps have names.
#[test]
fn waste_can_be_read_from_metrics() {
    let folder = mixture_without_weights("waste");
    let expected =
        [("atom_replays_total", "atom_eager_steps_total"), ("atom_eager_steps_total", "atom_replays_total")];
    for (flags, (all, none)) in [&[][..], &["--enforce-eager"]].into_iter().zip(expected) {
        let server = Server::start_model(&folder, &[&DEP4[..], flags].concat());
        let body =
            json!({"prompt": "x".repeat(40), "max_tokens": 20, "data_parallel_rank": 2, "ignore_eos": true});
        assert_eq!(server.post("/v1/completions", &body).0, 200);
        assert_eq!(server.post("/admin/pause", &json!({})).0, 200);
        let steps = server.by_lane(all);
        assert!(steps.len() == 4 && steps.iter().all(|&n| n == steps[0] && n >= 20.0), "{all}: {steps:?}");
        assert_eq!(server.by_lane(none), [0.0; 4]);
        let (_, text) = server.send("GET", "/metrics", b"");
        let has = |line: String| assert!(text.lines().any(|found| found == line), "no {line:?} in\n{text}");
        for lane in 0..4 {
            has(format!("atom_step_padding_share_count{{lane=\"{lane}\"}} {}", steps[0]));
            has(format!("atom_step_padding_share_of_fullest_lane_count{{lane=\"{lane}\"}} {}", steps[0]));
            has(format!("atom_step_padding_share_bucket{{lane=\"{lane}\",le=\"+Inf\"}} {}", steps[0]));
            let eager = if flags.is_empty() { 0.0 } else { steps[0] };
            has(format!("atom_eager_steps_total{{lane=\"{lane}\",cause=\"enforce_eager\"}} {eager}"));
            // Lane 2 has all rows, and its own bucket fits them; the others replay it with none.
            let (empty, below) = if lane == 2 { (0.0, steps[0]) } else { (steps[0], 0.0) };
            has(format!("atom_step_padding_share_bucket{{lane=\"{lane}\",le=\"0.75\"}} {below}"));
            has(format!("atom_step_padding_share_sum{{lane=\"{lane}\"}} {empty}"));
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
}
