use super::*;
use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// A server on the loopback interface: one reply for each connection, in turn.
struct Fake {
    address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
}

#[derive(Clone, Debug)]
struct Asked {
    head: String,
    body: Value,
}

/// A reply in raw bytes after the head; `holds` keeps the connection open behind them.
struct Reply {
    status: u16,
    kind: &'static str,
    body: String,
    holds: bool,
}

fn stream(body: &str) -> Reply {
    Reply { status: 200, kind: "text/event-stream", body: body.into(), holds: false }
}

fn object(status: u16, body: &str) -> Reply {
    Reply { status, kind: "application/json; charset=utf-8", body: body.into(), holds: false }
}

impl Fake {
    fn start(replies: Vec<Reply>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        std::thread::spawn(move || {
            let mut held = Vec::new();
            for (stream, reply) in listener.incoming().zip(replies) {
                let mut stream = stream.unwrap();
                log.lock().unwrap().push(read_request(&stream));
                let head = format!(
                    "HTTP/1.1 {} X\r\ncontent-type: {}\r\nconnection: close\r\n\r\n",
                    reply.status, reply.kind
                );
                // A client that hangs up early is a client's right.
                stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(reply.body.as_bytes())).ok();
                if reply.holds {
                    held.push(stream);
                }
            }
            // Held connections end with the listener, when a test is over: nobody waits for this thread.
            listener.incoming().for_each(drop);
        });
        Self { address, asked }
    }

    fn options(&self) -> RemoteOptions {
        RemoteOptions { url: self.address.to_string(), model: Some("m".into()), ..RemoteOptions::default() }
    }

    fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

fn read_request(stream: &TcpStream) -> Asked {
    let mut reader = BufReader::new(stream);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        if line.trim().is_empty() {
            break;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        head.push_str(&line);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    Asked { head, body: serde_json::from_slice(&body).unwrap_or_default() }
}

fn hello() -> Vec<Value> {
    vec![json!({"role": "user", "content": "hello"})]
}

/// The answer with all of its parts.
fn hear(remote: &Remote) -> Result<(Said, Vec<Part>)> {
    let mut parts = Vec::new();
    let said = remote.answer(&hello(), &AtomicBool::new(false), |part| {
        parts.push(part.clone());
        Ok(())
    })?;
    Ok((said, parts))
}

fn answer_to(reply: Reply) -> Result<(Said, Vec<Part>)> {
    let fake = Fake::start(vec![reply]);
    hear(&Remote::connect(fake.options()).unwrap())
}

#[test]
fn addresses_are_taken_in_every_usual_spelling() {
    for (url, expected) in [
        ("localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1", "http://localhost:8000/v1"),
        ("http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("https://gateway.example/team/v1", "https://gateway.example/team/v1"),
        ("https://gateway.example/openai", "https://gateway.example/openai/v1"),
        ("https://host/v1beta/openai/chat/completions", "https://host/v1beta/openai"),
        (" http://[::1]:9/v1/chat/completions ", "http://[::1]:9/v1"),
    ] {
        assert_eq!(base(url).unwrap(), expected, "{url}");
    }
    for url in ["", "ftp://host", "http://", "http://me:secret@host", "http://host/?x=1", "ho st"] {
        let message = format!("{:#}", base(url).unwrap_err());
        assert!(message.contains("--url"), "{url:?}: {message}");
    }
}

#[test]
fn the_request_has_what_the_user_chose_and_no_more() {
    let done = || stream("data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\ndata: [DONE]\n\n");
    let fake = Fake::start(vec![done(), object(200, r#"{"data": [{"id": "first"}, {"id": "x"}]}"#), done()]);
    hear(&Remote::connect(fake.options()).unwrap()).unwrap();
    let mut options = fake.options();
    (options.model, options.key) = (None, Some("sk-1".into()));
    options.sampling.insert("top_k".into(), json!(3));
    let remote = Remote::connect(options).unwrap();
    assert_eq!(remote.model(), "first");
    assert_eq!(hear(&remote).unwrap().0.text, "hi");
    let asked = fake.asked();
    let has_key = |at: usize| asked[at].head.to_ascii_lowercase().contains("authorization: bearer sk-1\r\n");
    assert!(asked[0].head.starts_with("POST /v1/chat/completions ") && !has_key(0), "{}", asked[0].head);
    assert_eq!(asked[0].body, json!({"model": "m", "messages": hello(), "stream": true}));
    assert!(asked[1].head.starts_with("GET /v1/models ") && has_key(1), "{}", asked[1].head);
    assert!(has_key(2));
    assert_eq!((&asked[2].body["model"], &asked[2].body["top_k"]), (&json!("first"), &json!(3)));
}

#[test]
fn models_are_found_in_the_lists_that_servers_give() {
    for (list, model) in [
        (r#"{"object": "list", "data": [{"id": "a"}]}"#, "a"),
        (r#"[{"id": "b"}]"#, "b"),
        (r#"{"models": [{"name": "c"}]}"#, "c"),
        (r#"{"data": ["d"]}"#, "d"),
    ] {
        let fake = Fake::start(vec![object(200, list)]);
        let remote = Remote::connect(RemoteOptions { model: None, ..fake.options() }).unwrap();
        assert_eq!(remote.model(), model);
    }
    for (status, list, words) in [
        (200, r#"{"data": []}"#, "lists no model"),
        (200, "<html>", "lists no model"),
        (404, r#"{"detail": "Not Found"}"#, "Not Found"),
        (401, r#"{"error": {"message": "no key"}}"#, "no key"),
    ] {
        let fake = Fake::start(vec![object(status, list)]);
        let error = Remote::connect(RemoteOptions { model: None, ..fake.options() }).err().unwrap();
        let error = format!("{error:#}");
        assert!(error.contains(words) && error.contains("--model"), "{error}");
    }
}

#[test]
fn a_stream_is_read_however_its_events_are_written() {
    let part = |text: &str| json!({"choices": [{"delta": {"content": text}}]}).to_string();
    let (one, two) = (part("one "), part("two"));
    let [first, second] = ["{\"choices\": [{\"delta\":", " {\"content\": \"two\"}}]}"];
    for body in [
        format!("data: {one}\n\ndata: {two}\n\ndata: [DONE]\n\n"),
        format!(
            "data:{one}\r\n\r\n: ping\r\n\r\nevent: message\r\nid: 7\r\ndata:{two}\r\n\r\ndata:[DONE]\r\n\r\n"
        ),
        format!("\u{feff}: hello\n\ndata: {one}\n\ndata: {first}\ndata: {second}\n\ndata: [DONE]\n\n"),
        // An end of the answer and none of the stream, nor of its last event.
        format!(
            "data: {one}\n\ndata: {two}\n\ndata: {{\"choices\": [{{\"delta\": {{}}, \"finish_reason\": \"stop\"}}]}}"
        ),
        // Roles, nulls, empty choices and usage say nothing.
        format!(
            "data: {{\"choices\": [{{\"delta\": {{\"role\": \"assistant\", \"content\": null}}}}]}}\n\ndata: {one}\n\n\
             data: {two}\n\ndata: {{\"choices\": [], \"usage\": {{\"total_tokens\": 3}}}}\n\ndata: [DONE]\n\ndata: {one}\n\n"
        ),
    ] {
        let (said, parts) = answer_to(stream(&body)).unwrap();
        assert_eq!(said, Said { text: "one two".into(), ..Said::default() }, "{body}");
        assert_eq!(parts, [Part::Text("one ".into()), Part::Text("two".into())]);
    }
}

#[test]
fn reasoning_is_apart_under_either_name_and_a_cut_answer_says_so() {
    let text = r#"{"choices": [{"delta": {"content": [{"type": "text", "text": "so"}]}, "finish_reason": "length"}]}"#;
    for name in ["reasoning_content", "reasoning"] {
        let thought = json!({"choices": [{"delta": {name: "hm"}}]});
        let (said, parts) = answer_to(stream(&format!("data: {thought}\n\ndata: {text}\n\n"))).unwrap();
        assert_eq!(said, Said { text: "so".into(), is_cut: true, ..Said::default() });
        assert_eq!(parts, [Part::Reasoning("hm".into()), Part::Text("so".into()), Part::Cut]);
    }
    let whole = r#"{"choices": [{"message": {"reasoning_content": "hm", "content": "so"}, "finish_reason": "stop"}]}"#;
    let (said, parts) = answer_to(object(200, whole)).unwrap();
    assert_eq!((said.text.as_str(), parts.len()), ("so", 2), "a server that does not stream");
}

#[test]
fn errors_are_told_in_the_servers_words_whatever_their_shape() {
    for (status, body, words) in [
        (400, r#"{"error": {"message": "too long", "type": "x"}}"#, "400"),
        (400, r#"{"error": {"message": "too long", "type": "x"}}"#, "too long"),
        (404, r#"{"error": "no such model"}"#, "no such model"),
        (400, r#"{"object": "error", "message": "bad field", "code": 400}"#, "bad field"),
        (
            422,
            r#"{"detail": [{"loc": ["body", "messages", 0], "msg": "missing"}]}"#,
            "body.messages.0: missing",
        ),
        (401, r#"{"detail": "no key"}"#, "no key"),
        (500, r#"{"errors": [{"message": "one"}, {"message": "two"}]}"#, "one; two"),
        (502, "<html>\nBad gateway</html>", "<html> Bad gateway</html>"),
        (503, "", "(nothing)"),
        (200, r#"{"error": {"message": "a success that is none"}}"#, "a success that is none"),
    ] {
        let error = format!("{:#}", answer_to(object(status, body)).unwrap_err());
        assert!(error.contains(words), "{body}: {error}");
    }
    let begun = "data: {\"choices\": [{\"delta\": {\"content\": \"a\"}}]}\n\n";
    for (rest, words) in [
        ("data: {\"error\": {\"message\": \"rank 1 is gone\"}}\n\n", "rank 1 is gone"),
        ("event: error\ndata: {\"type\": \"error\", \"error\": {\"message\": \"busy\"}}\n\n", "busy"),
        ("data: {\"object\": \"error\", \"message\": \"late\"}\n\n", "late"),
        ("data: nonsense\n\n", "nonsense"),
        ("", "ended before the answer did"),
        (
            "data: {\"choices\": [{\"delta\": {\"tool_calls\": [{\"function\": {\"name\": \"f\"}}]}}]}\n\n",
            "'f'",
        ),
    ] {
        let error = format!("{:#}", answer_to(stream(&format!("{begun}{rest}"))).unwrap_err());
        assert!(error.contains(words), "{rest}: {error}");
    }
}

#[test]
fn a_redirect_is_not_followed_and_a_closed_port_is_named() {
    let error = format!("{:#}", answer_to(object(307, "elsewhere")).unwrap_err());
    assert!(error.contains("307"), "{error}");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let remote = Remote::connect(RemoteOptions {
        url: port.to_string(),
        model: Some("m".into()),
        ..RemoteOptions::default()
    });
    let error = format!("{:#}", hear(&remote.unwrap()).unwrap_err());
    assert!(error.contains(&port.to_string()), "{error}");
}

#[test]
fn an_interrupt_ends_the_wait_for_a_server_that_says_no_more() {
    let begun =
        Reply { holds: true, ..stream("data: {\"choices\": [{\"delta\": {\"content\": \"a\"}}]}\n\n") };
    let fake = Fake::start(vec![begun]);
    let remote = Remote::connect(fake.options()).unwrap();
    let interrupt = AtomicBool::new(false);
    let said = remote.answer(&hello(), &interrupt, |_| {
        interrupt.store(true, Ordering::SeqCst);
        Ok(())
    });
    assert_eq!(said.unwrap(), Said { text: "a".into(), interrupted: true, is_cut: false });
}
