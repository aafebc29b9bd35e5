//! The binary as a server on a free port, and requests to it.
#![allow(dead_code, reason = "each test file uses its own part")]

use crate::model;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

/// A server that is stopped when dropped.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) address: String,
}

impl Server {
    pub(crate) fn start(flags: &[&str]) -> Self {
        let limits = ["--max-model-len", "1024"];
        Self::start_model(&model::smollm2(), &[&limits, flags].concat())
    }

    pub(crate) fn start_model(model: &std::path::Path, flags: &[&str]) -> Self {
        Self::start_in(&[], model, flags)
    }

    /// With variables of the environment.
    pub(crate) fn start_in(variables: &[(&str, &str)], model: &std::path::Path, flags: &[&str]) -> Self {
        let mut child = model::atom()
            .envs(variables.iter().copied())
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
    pub(crate) fn send(&self, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        let mut socket = TcpStream::connect(&self.address).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
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

    /// Sends a request and leaves the answer on its way; dropping the socket takes it back.
    pub(crate) fn begin(&self, path: &str, body: &Value) -> TcpStream {
        let (mut socket, body) = (TcpStream::connect(&self.address).unwrap(), body.to_string());
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        socket.write_all(head.as_bytes()).unwrap();
        socket.write_all(body.as_bytes()).unwrap();
        socket
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> (u16, String) {
        self.send("POST", path, body.to_string().as_bytes())
    }

    pub(crate) fn chat(&self) -> String {
        let body = json!({"messages": [{"role": "user", "content": "What is the capital of France? Answer with one word."}], "temperature": 0, "max_tokens": 12});
        let (status, text) = self.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).unwrap();
        answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    }

    pub(crate) fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.send("GET", "/metrics", b"");
        let lines = text.lines().filter(|l| l.starts_with(name) && !l.starts_with('#'));
        lines.map(|l| l.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }

    /// The samples of a family, in the order of lanes.
    pub(crate) fn by_lane(&self, name: &str) -> Vec<f64> {
        let (_, text) = self.send("GET", "/metrics", b"");
        let lines = text.lines().filter(|line| line.starts_with(&format!("{name}{{")));
        lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
    }

    /// Sends SIGTERM.
    pub(crate) fn terminate(&self) {
        let kill = Command::new("kill").arg("-TERM").arg(self.child.id().to_string()).status().unwrap();
        assert!(kill.success());
    }

    pub(crate) fn stop(mut self) {
        self.terminate();
        assert!(self.child.wait().unwrap().success(), "a clean end after SIGTERM");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A mixture's configuration with a tokenizer of single bytes: all that `--load-dummy` needs.
pub(crate) fn mixture_without_weights(name: &str) -> std::path::PathBuf {
    let folder =
        std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
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
        "head_dim": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": false,
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder
}
