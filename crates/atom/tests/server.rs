//! The binary as a user starts it: layouts, bad input, disconnects, signals.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

#[path = "common/model.rs"]
mod model;
#[path = "common/server.rs"]
mod server;

use serde_json::{Value, json};
use server::Server;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::Stdio;

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
    // Its template has no tools, and a client must not believe that the model knows of them.
    let tool = json!({"tools": [{"type": "function", "function": {"name": "weather"}}]});
    let (status, body) = server.post("/v1/chat/completions", &chat(tool.clone()));
    assert!(body.contains("chat template doesn't show tools"), "{body}");
    expect_refusal(&(status, body));
    let hidden = json!({"tools": tool["tools"], "tool_choice": "none"});
    assert_eq!(server.post("/v1/chat/completions", &chat(hidden)).0, 200);
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

/// Every document that a small model writes is one of the schema, in one lane and in lanes of a group.
#[test]
fn a_real_model_writes_what_its_schema_says() {
    let schema = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "inhabitants": {"type": "integer", "minimum": 1, "maximum": 99_999_999},
            "kind": {"enum": ["capital", "other"]},
        },
        "required": ["city", "inhabitants", "kind"],
        "additionalProperties": false,
    });
    let body = json!({
        "messages": [{"role": "user", "content": "Describe Paris as JSON."}],
        "n": 3, "seed": 5, "max_tokens": 250, "logprobs": true, "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    });
    for flags in [&[][..], &["-tp", "2", "--enable-dp-attention"]] {
        let server = Server::start(flags);
        let (status, text) = server.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        for choice in answer["choices"].as_array().unwrap() {
            assert_eq!(choice["finish_reason"], "stop", "{choice}");
            let content = choice["message"]["content"].as_str().unwrap();
            let city: Value = serde_json::from_str(content).unwrap_or_else(|e| panic!("{e}: {content}"));
            assert_eq!(city.as_object().unwrap().len(), 3);
            assert!(city["city"].as_str().unwrap().chars().count() <= 20, "{city}");
            assert!((1..=99_999_999).contains(&city["inhabitants"].as_u64().unwrap()), "{city}");
            assert!(["capital", "other"].contains(&city["kind"].as_str().unwrap()), "{city}");
            for entry in choice["logprobs"]["content"].as_array().unwrap() {
                assert!(entry["logprob"].as_f64().unwrap() <= 0.0, "{entry}");
            }
        }
        server.stop();
    }
}

#[test]
fn a_client_that_goes_away_frees_its_request() {
    let server = Server::start_model(&model::smollm2(), &["--max-model-len", "2800"]);
    let body = json!({"prompt": "Once upon a time", "max_tokens": 2700, "stream": true, "ignore_eos": true})
        .to_string();
    let mut socket = TcpStream::connect(&server.address).unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    socket.write_all(head.as_bytes()).unwrap();
    socket.write_all(body.as_bytes()).unwrap();
    let mut lines = BufReader::new(socket.try_clone().unwrap()).lines();
    let text = lines.find(|line| line.as_ref().unwrap().contains("\"text\":"));
    assert!(text.is_some(), "the answer has begun");
    drop(lines);
    drop(socket);
    // It ends in any case: what counts is that it didn't write all it was asked for, however slow we look.
    while server.metric("atom_num_requests_running") > 0.0 {}
    let written = server.metric("atom_generation_tokens_total");
    assert!((1.0..2700.0).contains(&written), "{written} tokens for nobody");
    assert_eq!(server.metric("atom_kv_pages_held"), 0.0);
    server.stop();
}

#[test]
fn chat_speaks_to_a_server_elsewhere() {
    let server = Server::start(&[]);
    let chat = |flags: &[&str], said: &str| {
        let mut child = model::atom()
            .args(["chat", "--url", &server.address])
            .args(flags)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A chat that refuses its flags does not read.
        child.stdin.take().unwrap().write_all(said.as_bytes()).ok();
        let output = child.wait_with_output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.success(), text(output.stdout), text(output.stderr))
    };
    let question = "What is the capital of France? Answer with one word.\n";
    let (ok, out, err) = chat(&["--temperature", "0"], question);
    assert!(ok && out.contains("/v1") && out.contains("Paris"), "{out} {err}");
    let (ok, out, err) = chat(&["--max-tokens", "1"], question);
    assert!(ok && out.ends_with("[cut: no tokens left]\n"), "{out} {err}");
    let (ok, _, err) = chat(&["--model", "other"], question);
    assert!(ok && err.contains("404") && err.contains("other"), "the conversation goes on: {err}");
    let (ok, out, err) = chat(&["--threads", "2"], question);
    assert!(!ok && out.is_empty() && err.contains("--threads"), "{out} {err}");
    server.stop();
}

#[test]
fn a_chat_shows_control_characters_of_a_server_and_does_not_pass_them_on() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serving = std::thread::spawn(move || {
        let say = |delta: Value| format!("data: {}\n\n", json!({"choices": [{"index": 0, "delta": delta}]}));
        let replies = [
            ("application/json", 200, json!({"data": [{"id": "m\u{1b}[2J"}]}).to_string()),
            (
                "text/event-stream",
                200,
                say(json!({"reasoning_content": "hm\u{1b}[31m"}))
                    + &say(json!({"content": "a\n\tb\u{1b}]0;t\u{7}\rc\u{9b}2J"}))
                    + "data: [DONE]\n\n",
            ),
            ("application/json", 500, json!({"error": {"message": "no\u{1b}[0m"}}).to_string()),
        ];
        for (kind, status, body) in replies {
            let (mut socket, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(socket.try_clone().unwrap());
            let (mut line, mut length) = (String::new(), 0);
            while reader.read_line(&mut line).unwrap() > 2 {
                let (name, value) = line.split_once(':').unwrap_or_default();
                if name.eq_ignore_ascii_case("content-length") {
                    length = value.trim().parse().unwrap();
                }
                line.clear();
            }
            std::io::Read::read_exact(&mut reader, &mut vec![0; length]).unwrap();
            let length = body.len();
            let head = format!("HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n");
            write!(socket, "{head}connection: close\r\n\r\n{body}").unwrap();
        }
    });
    let (read, mut write) = std::io::pipe().unwrap();
    write.write_all(b"one\ntwo\n").unwrap();
    drop(write);
    let output = model::atom().args(["chat", "--url", &url]).stdin(read).output().unwrap();
    serving.join().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (out, err) = (text(output.stdout), text(output.stderr));
    for shown in [&out, &err] {
        let passed_on = |c: char| c.is_control() && c != '\n' && c != '\t';
        assert!(!shown.contains(passed_on), "{shown:?}");
    }
    assert!(out.contains("a\n\tb\\u{1b}]0;t\\u{7}\\rc\\u{9b}2J") && out.contains("m\\u{1b}[2J at"), "{out}");
    assert!(err.contains("hm\\u{1b}[31m") && err.contains("500") && err.contains("[0m"), "{err}");
}

#[test]
fn keys_lock_the_server_and_requests_are_written_down() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("locked");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let (keys, log, old) = (folder.join("keys"), folder.join("log"), folder.join("log.1"));
    std::fs::write(&keys, "# ours\nsk-of-the-file\n").unwrap();
    let flags = ["--max-model-len", "1024", "--api-key-file", keys.to_str().unwrap(), "--request-log"];
    let flags = [&flags[..], &[log.to_str().unwrap()]].concat();
    let server = Server::start_in(&[("ATOM_API_KEY", "sk-of-the-variable")], &model::smollm2(), &flags);
    let status = |header: &str| {
        let mut socket = TcpStream::connect(&server.address).unwrap();
        write!(socket, "GET /v1/models HTTP/1.1\r\nhost: localhost\r\n{header}connection: close\r\n\r\n")
            .unwrap();
        let mut line = String::new();
        BufReader::new(socket).read_line(&mut line).unwrap();
        line.split(' ').nth(1).unwrap().to_owned()
    };
    assert_eq!(status(""), "401");
    assert_eq!(status("authorization: Bearer sk-of-the-file\r\n"), "200");
    std::fs::rename(&log, &old).unwrap();
    let hangup = std::process::Command::new("kill").arg("-HUP").arg(server.child.id().to_string()).status();
    assert!(hangup.unwrap().success());
    while !log.exists() {
        // The signal is on its way.
        std::thread::yield_now();
    }
    assert_eq!(status("x-api-key: sk-of-the-variable\r\n"), "200");
    assert_eq!(server.send("GET", "/health", b"").0, 200);
    server.stop();
    let statuses = |path: &std::path::PathBuf| -> Vec<u64> {
        let text = std::fs::read_to_string(path).unwrap();
        assert!(!text.contains("sk-"), "{text}");
        let entry = |line: &str| serde_json::from_str::<Value>(line).unwrap()["status"].as_u64().unwrap();
        text.lines().map(entry).collect()
    };
    assert_eq!((statuses(&old), statuses(&log)), (vec![401, 200], vec![200, 200]));
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
    let large = ["serve", "--port", "0", "--model", model, "--max-num-batched-tokens", "512"];
    refused(
        &[&large[..], &["--workspace-memory", "1MiB"]].concat(),
        &["steps of 512 rows", "lower it to", "1 ranks", "--workspace-memory is 1.0 MiB"],
    );
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
    let port_0 = ["serve", "--port", "0", "--model", model];
    refused(
        &[&port_0[..], &["--tls-cert", model, "--tls-key", model]].concat(),
        &["--tls-cert", "certificate"],
    );
    refused(&[&port_0[..], &["--api-key-file", "/no/such/keys"]].concat(), &["--api-key-file /no/such/keys"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    refused(&["serve", "--port", &port, "--model", model], &[&port, "--port"]);
    let cut = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("cut.gguf");
    std::fs::write(&cut, &std::fs::read(model).unwrap()[..1_000_000]).unwrap();
    refused(&["serve", "--port", "0", "--model", cut.to_str().unwrap()], &["cut.gguf"]);
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
