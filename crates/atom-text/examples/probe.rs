//! probe
use atom_text::*;
use std::time::Instant;
fn gguf(path: &str) -> GgufVocabulary {
    let j: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let strs =
        |k: &str| j[k].as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_owned()).collect::<Vec<_>>();
    GgufVocabulary {
        model: j["model"].as_str().unwrap().into(),
        pre: j["pre"].as_str().unwrap().into(),
        tokens: strs("tokens"),
        merges: strs("merges"),
        token_types: j["token_types"]
            .as_array()
            .unwrap()
            .iter()
            .map(|v| v.as_i64().unwrap() as i32)
            .collect(),
        bos: j["bos"].as_u64().map(|v| v as u32),
        eos: j["eos"].as_u64().map(|v| v as u32),
        add_bos: j["add_bos"].as_bool(),
        chat_template: j["chat_template"].as_str().map(Into::into),
        ..Default::default()
    }
}
fn rss() -> String {
    std::fs::read_to_string("/proc/self/status")
        .unwrap()
        .lines()
        .filter(|l| l.starts_with("VmHWM") || l.starts_with("VmRSS"))
        .collect::<Vec<_>>()
        .join(" ")
}
fn main() {
    let what = std::env::args().nth(1).unwrap();
    let load = |arg: &str| {
        if arg.ends_with(".json") {
            TokenizerSource::Gguf(gguf(arg))
        } else {
            TokenizerSource::Folder(arg.into())
        }
    };
    if what == "snips" {
        let source = TokenizerSource::Gguf(gguf("/tmp/tt/smollm2.json"));
        let t = Tokenizer::load(&source).unwrap();
        let j: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string("/tmp/tt/snips.json").unwrap()).unwrap();
        let mut kw = serde_json::Map::new();
        for k in ["x", "y"] {
            kw.insert(k.into(), j["ctx"][k].clone());
        }
        let mut bad = 0;
        for (s, want) in j["S"].as_array().unwrap().iter().zip(j["out"].as_array().unwrap()) {
            let got = ChatTemplate::load(&source, &t, Some(s.as_str().unwrap()))
                .and_then(|c| {
                    c.render(&TemplateInput {
                        messages: &j["ctx"]["messages"],
                        tools: j["ctx"].get("tools"),
                        add_generation_prompt: true,
                        kwargs: Some(&kw),
                        now_unix_s: 1709208000,
                    })
                })
                .unwrap_or_else(|e| format!("ERR {e}"));
            if got != want.as_str().unwrap() {
                bad += 1;
                println!("TEMPLATE {s}\n  want {want:?}\n  got  {got:?}");
            }
        }
        println!("{bad} differ of {}", j["S"].as_array().unwrap().len());
    } else if what == "ids" {
        // JSON list of texts -> JSON list of id lists
        let t = Tokenizer::load(&load(&std::env::args().nth(2).unwrap())).unwrap();
        let texts: Vec<String> =
            serde_json::from_str(&std::fs::read_to_string(std::env::args().nth(3).unwrap()).unwrap())
                .unwrap();
        let special = std::env::args().nth(4).is_some();
        println!(
            "{}",
            serde_json::to_string(&texts.iter().map(|x| t.encode(x, special).unwrap()).collect::<Vec<_>>())
                .unwrap()
        );
    } else if what == "tok" {
        let arg = std::env::args().nth(2).unwrap();
        let source = load(&arg);
        let t0 = Instant::now();
        let t = Tokenizer::load(&source).unwrap();
        println!("build {:?} {t:?} bos {:?} eos {:?} {}", t0.elapsed(), t.bos(), t.eos(), rss());
        println!("{:?}", t.encode("The capital of France is", true).unwrap());
        let text = std::env::args().nth(3).map(|p| std::fs::read_to_string(p).unwrap()).unwrap_or_default();
        for _ in 0..3 {
            let t0 = Instant::now();
            let ids = t.encode(&text, false).unwrap();
            let dt = t0.elapsed();
            println!(
                "{} bytes {} tokens {:?} {:.2} MB/s {}",
                text.len(),
                ids.len(),
                dt,
                text.len() as f64 / dt.as_secs_f64() / 1e6,
                rss()
            );
            assert_eq!(t.decode(&ids, false), text);
        }
        for (name, s) in [
            ("spaces", " ".repeat(1 << 20)),
            ("spaces+x", " ".repeat(1 << 20) + "x"),
            ("3M spaces+x", " ".repeat(3 << 20) + "x y z 12345"),
            ("a", "a".repeat(1 << 20)),
            ("newlines", "\n".repeat(1 << 20)),
            ("newlines x", "\n".repeat(1 << 20) + "x y z 12345"),
            ("space newlines", " \n".repeat(1 << 19) + "x"),
            ("dots", ".".repeat(1 << 20)),
            ("digits", "1".repeat(1 << 20)),
            ("apos", "'".repeat(1 << 20)),
            ("e-acc", "e\u{301}".repeat(1 << 18)),
            ("spaces200k+x", " ".repeat(200_000) + "x y z 12345"),
            ("ctrl", "\u{4}".repeat(1000)),
        ] {
            let t0 = Instant::now();
            let ids = t.encode(&s, false).unwrap();
            println!(
                "{name}: {} bytes -> {} tokens, last {:?}, {:?} {}",
                s.len(),
                ids.len(),
                ids.iter().rev().take(9).rev().map(|&i| t.token_text(i)).collect::<Vec<_>>(),
                t0.elapsed(),
                rss()
            );
        }
    } else {
        let vocab = gguf("/tmp/tt/smollm2.json");
        let source = TokenizerSource::Gguf(vocab);
        let t = Tokenizer::load(&source).unwrap();
        let text = std::fs::read_to_string(std::env::args().nth(2).unwrap()).unwrap();
        let t0 = Instant::now();
        let c = ChatTemplate::load(&source, &t, Some(&text)).unwrap();
        println!("load {:?}", t0.elapsed());
        let n: usize = std::env::args().nth(3).map_or(1, |n| n.parse().unwrap());
        let len: usize = std::env::args().nth(4).map_or(10, |n| n.parse().unwrap());
        let messages: Vec<_> = (0..n).map(|i| serde_json::json!({"role": (["user", "assistant"][i % 2]), "content": "word ".repeat(len)})).collect();
        let messages = serde_json::Value::Array(messages);
        let t0 = Instant::now();
        let r = c.render(&TemplateInput {
            messages: &messages,
            tools: None,
            add_generation_prompt: true,
            kwargs: None,
            now_unix_s: 0,
        });
        println!("{:?} {}", t0.elapsed(), rss());
        match r {
            Ok(s) => println!("{} bytes: {}", s.len(), s.chars().take(600).collect::<String>()),
            Err(e) => println!("ERR {}", e.to_string().chars().take(600).collect::<String>()),
        }
    }
}
#[allow(dead_code)]
fn noop() {}
