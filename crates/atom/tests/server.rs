//! The binary as a user starts it: layouts, bad input, disconnects, signals.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

#[path = "common/model.rs"]
mod model;

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

/// A server that is stopped when dropped.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(flags: &[&str]) -> Self {
        let limits = ["--max-model-len", "1024"];
        Self::start_model(&model::smollm2(), &[&limits, flags].concat())
    }

    fn start_model(model: &std::path::Path, flags: &[&str]) -> Self {
        let mut child = model::atom()
            .args(["serve", "--port", "0", "--log", "warn", "--kv-cache-memory", "64MiB"])
            .arg("--model")
            .arg(model)
            .args(flags)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let mut line = String::new();
        let stdout = child.stdout.as_mut().expect("piped");
        BufReader::new(stdout).read_line(&mut line).unwrap();
        let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next());
        Self { address: address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned(), child }
    }

    /// Status and body of one request on its own connection.
    fn send(&self, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        let mut socket = TcpStream::connect(&self.address).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: atom\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        socket.write_all(head.as_bytes()).unwrap();
        // A server that refuses a body early may close before it is all written.
        let _ = socket.write_all(body);
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
        let status =
            head.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or_else(|| panic!("{head:?}"));
        (status, body.to_owned())
    }

    fn post(&self, path: &str, body: &Value) -> (u16, String) {
        self.send("POST", path, body.to_string().as_bytes())
    }

    fn chat(&self) -> String {
        let body = json!({"messages": [{"role": "user", "content": "What is the capital of France? Answer with one word."}], "temperature": 0, "max_tokens": 12});
        let (status, text) = self.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    }

    fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.send("GET", "/metrics", b"");
        let lines = text.lines().filter(|l| l.starts_with(name) && !l.starts_with('#'));
        lines.map(|l| l.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }

    fn stop(mut self) {
        let kill = Command::new("kill").arg("-TERM").arg(self.child.id().to_string()).status().unwrap();
        assert!(kill.success());
        assert!(self.child.wait().unwrap().success(), "a clean end after SIGTERM");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn every_layout_answers_and_stops() {
    for flags in [&[][..], &["-tp", "3"], &["-dp", "2"], &["-tp", "2", "--enable-dp-attention"]] {
        let server = Server::start(flags);
        let answer = server.chat();
        assert!(answer.contains("Paris"), "{flags:?}: {answer}");
        assert!(server.metric("atom_replays_total") > 0.0);
        assert!(server.metric("atom_recordings_total") > 0.0);
        assert_eq!(server.metric("atom_eager_steps_total"), 0.0);
        let (status, health) = server.send("GET", "/health", b"");
        assert_eq!(status, 200, "{health}");
        server.stop();
    }
}

#[test]
fn bad_input_is_a_4xx_in_the_openai_shape_and_the_server_goes_on() {
    let server = Server::start(&[]);
    let chat = |more: Value| {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let long = "word ".repeat(3000);
    let bodies = [
        chat(json!({"messages": []})),
        chat(json!({"messages": [{"role": "user", "content": long}]})),
        chat(json!({"max_tokens": 1_000_000})),
        chat(json!({"n": 0})),
        chat(json!({"temperature": "NaN"})),
        chat(json!({"temperature": -1})),
        chat(json!({"frequency_penalty": 3})),
        chat(json!({"top_p": 0})),
        chat(json!({"tools": [{"type": "function"}]})),
        chat(json!({"no_such_field": 1})),
        chat(json!({"model": "other"})),
    ];
    for body in &bodies {
        expect_refusal(&server.post("/v1/chat/completions", body));
    }
    expect_refusal(&server.send("POST", "/v1/chat/completions", b"{\"messages\": ["));
    expect_refusal(&server.send("POST", "/v1/chat/completions", b"{\"messages\": \"\xff\xfe\"}"));
    expect_refusal(&server.send("POST", "/v1/completions", b"[]"));
    expect_refusal(&server.send("GET", "/v1/nowhere", b""));
    expect_refusal(&server.send("DELETE", "/v1/completions", b""));
    let (status, _) = server.send("POST", "/v1/completions", &vec![b' '; 100_000_000]);
    assert_eq!(status, 413);
    assert!(server.chat().contains("Paris"));
    server.stop();
}

fn expect_refusal((status, body): &(u16, String)) {
    assert!((400..500).contains(status), "{status}: {body}");
    let body: Value = serde_json::from_str(body).unwrap_or_else(|e| panic!("{e}: {body}"));
    assert!(body["error"]["message"].as_str().is_some_and(|m| !m.is_empty()), "{body}");
}

#[test]
fn a_client_that_goes_away_frees_its_request() {
    let server = Server::start(&[]);
    let body = json!({"prompt": "Once upon a time", "max_tokens": 900, "stream": true, "ignore_eos": true})
        .to_string();
    let mut socket = TcpStream::connect(&server.address).unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: atom\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).unwrap();
    socket.write_all(body.as_bytes()).unwrap();
    let mut lines = BufReader::new(socket.try_clone().unwrap()).lines();
    let text = lines.find(|line| line.as_ref().unwrap().contains("\"text\":"));
    assert!(text.is_some(), "the answer has begun");
    drop(lines);
    assert!(server.metric("atom_num_requests_running") > 0.0);
    drop(socket);
    // It would run for seconds otherwise; each look takes a millisecond.
    let gone = (0..2000).any(|_| server.metric("atom_num_requests_running") == 0.0);
    assert!(gone, "the request still runs");
    assert_eq!(server.metric("atom_kv_pages_held"), 0.0);
    server.stop();
}

#[test]
fn a_wrong_start_is_one_clear_line_and_a_failure() {
    let refused = |flags: &[&str], says: &[&str]| {
        let output = model::atom().args(flags).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{flags:?} was accepted");
        assert!(says.iter().all(|word| text.contains(word)), "{flags:?}: {text}");
        assert!(!text.contains("panicked"), "{text}");
    };
    let model = model::smollm2();
    let model = model.to_str().unwrap();
    refused(&["serve", "--offline", "--model", "no-such-model"], &["no-such-model"]);
    refused(&["serve", "--model", "./no/such/file.gguf"], &["no/such/file.gguf"]);
    refused(
        &["serve", "--port", "0", "--model", model, "-tp", "2"],
        &["-tp 2", "9 query heads", "3 key/value heads"],
    );
    refused(&["serve", "--port", "0", "--model", model, "--max-num-seqs", "0"], &["--max-num-seqs"]);
    refused(&["serve", "--port", "0", "--model", model, "--max-model-len", "100000"], &["100000", "8192"]);
    refused(&["serve", "--port", "0", "--model", model, "--block-size", "17"], &["17"]);
    refused(&["serve", "--port", "0", "--model", model, "--token-graph-sizes", "9999999"], &["9999999"]);
    refused(&["serve", "--port", "0", "--model", model, "--kv-cache-memory", "1"], &["--kv-cache-memory"]);
    refused(
        &["serve", "--port", "0", "--model", model, "--max-num-batched-tokens", "60000"],
        &["--max-num-batched-tokens 60000", "rows"],
    );
    refused(
        &["serve", "--port", "0", "--model", model, "--enable-expert-parallel"],
        &["--enable-expert-parallel has no meaning here", "no experts"],
    );
    refused(&["serve", "--port", "0", "--model", model, "--nodes", "2"], &["--nodes 2 needs --master"]);
    let hosts = ["serve", "--port", "0", "--model", model, "--nodes", "2", "--master", "127.0.0.1:1", "-tp"];
    refused(&[&hosts[..], &["3"]].concat(), &["-tp N --enable-dp-attention"]);
    refused(&[&hosts[..], &["3", "--enable-dp-attention"]].concat(), &["3 lanes can't be dealt evenly"]);
    refused(&["serve", "--model", model, "--load-dummy"], &["config.json", "is none"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    refused(&["serve", "--port", &port, "--model", model], &[&port, "--port"]);
    let cut = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("cut.gguf");
    std::fs::write(&cut, &std::fs::read(model).unwrap()[..1_000_000]).unwrap();
    refused(&["serve", "--port", "0", "--model", cut.to_str().unwrap()], &["cut.gguf"]);
}

/// A mixture's configuration with a tokenizer of single bytes: all that `--load-dummy` needs.
fn mixture_without_weights() -> std::path::PathBuf {
    let folder =
        std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("mixture-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    // The byte-level alphabet: printable bytes are themselves, the others come from 256 up.
    let is_printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = 256..;
    let letter =
        |byte| char::from_u32(if is_printable(byte) { byte } else { others.next().unwrap() }).unwrap();
    let vocab: serde_json::Map<_, _> = (0..256)
        .map(letter)
        .zip(0..)
        .map(|(letter, id): (char, u32)| (letter.to_string(), json!(id)))
        .collect();
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    let config = json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 256,
        "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": false,
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder
}

/// DEP4 under load: everybody is answered, every step of every lane is a replay.
#[test]
fn a_mixture_on_four_ranks_replays_every_step_under_load() {
    let folder = mixture_without_weights();
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
    let metrics = server.send("GET", "/metrics", b"").1;
    let of = |name: &str| -> Vec<f64> {
        let lines = metrics.lines().filter(|line| line.starts_with(name));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
    };
    let replays = of("atom_replays_total{");
    assert!(replays.len() == 4 && replays.iter().all(|&n| n == replays[0] && n >= 40.0), "{replays:?}");
    assert_eq!(of("atom_eager_steps_total{"), [0.0; 4]);
    // Every row chose two experts in each of two layers, and every choice was computed by one rank.
    let sum = |name: &str| of(name).iter().sum::<f64>();
    assert_eq!(sum("atom_expert_rows_chosen_total{"), 4.0 * sum("atom_rows_total{"));
    assert_eq!(sum("atom_expert_rows_computed_total{"), sum("atom_expert_rows_chosen_total{"));
    std::fs::remove_dir_all(folder).unwrap();
}

/// Two processes, one group: each serves its own lane, and the MLPs of both are split over both.
#[test]
fn two_processes_are_one_group_and_a_killed_one_is_named() {
    let master = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let start = |node: &'static str| {
        let master = master.clone();
        std::thread::spawn(move || {
            let flags =
                ["-tp", "2", "--enable-dp-attention", "--threads", "2", "--nodes", "2", "--enable-admin"];
            Server::start(&[&flags[..], &["--master", &master, "--node-rank", node]].concat())
        })
    };
    let (first, second) = (start("0"), start("1"));
    let (mut first, mut second) = (first.join().unwrap(), second.join().unwrap());
    for server in [&first, &second, &first] {
        assert!(server.chat().contains("Paris"));
    }
    // A pause is the group's, whichever host is asked.
    let (status, paused) = second.post("/admin/pause", &json!({}));
    assert_eq!(status, 200, "{paused}");
    assert_eq!(first.send("GET", "/health", b"").0, 503);
    let (status, resumed) = first.post("/admin/resume", &json!({}));
    assert_eq!(status, 200, "{resumed}");
    for server in [&second, &first] {
        assert!(server.chat().contains("Paris"));
    }
    let long = json!({"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": true});
    let (status, text) = std::thread::scope(|scope| {
        let answer = scope.spawn(|| first.post("/v1/completions", &long));
        // Both steps go on while the first request runs: the second host answers, and is gone.
        assert!(second.chat().contains("Paris"));
        second.child.kill().unwrap();
        answer.join().unwrap()
    });
    assert_eq!(status, 500, "{text}");
    assert!(text.contains("host 1"), "{text}");
    assert!(!first.child.wait().unwrap().success(), "it ends with a failure");
}

#[test]
fn generate_completes_a_prompt_from_argument_or_stdin() {
    let model = model::smollm2();
    let generate = |prompt: Option<&str>, stdin: &str| {
        let mut command = model::atom();
        command
            .args(["generate", "--log", "warn", "--temperature", "0", "--max-tokens", "4", "--model"])
            .arg(&model);
        let mut child = command.args(prompt).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(generate(Some("The capital of France is"), "").contains("Paris"));
    assert!(generate(None, "The capital of France is").contains("Paris"));
}
