//! `atom chat`: a conversation in the terminal, with a model here or with a server elsewhere. Ctrl-C stops a
//! reply and not the program.

use crate::args::{ChatArgs, EngineArgs};
use crate::generate::Speaker;
use crate::launch::{Running, launch};
use crate::output::{Gone, say, visible};
use crate::remote::{Part, Remote, RemoteOptions, Said};
use anyhow::{Context, Result, bail, ensure};
use atom_text::TemplateInput;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args};
use serde_json::{Map, Value, json};
use std::io::{BufRead, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Reads a line, answers, and so on. `given` says which flags the user wrote.
pub(crate) fn run(args: &ChatArgs, given: &ArgMatches) -> Result<()> {
    if let Some(url) = &args.url {
        let remote = Remote::connect(remote_options(url, args, given)?)?;
        let name = format!("{} at {}", remote.model(), remote.base());
        return converse(args, &name, |messages, interrupt| hear(&remote, messages, interrupt));
    }
    ensure!(args.api_key.is_none(), "--api-key goes with --url: a model that runs here asks for none");
    let running = launch(&args.engine)?;
    ensure!(
        running.text.template.is_present(),
        "this model has no chat template; give one with --chat-template, or use `atom generate`"
    );
    let mut speaker = Speaker::new(&running);
    converse(args, &running.served_name, |messages, interrupt| {
        let prompt = render(&running, messages)?;
        let reply = speaker.speak("", &prompt, &args.sampling, interrupt)?;
        Ok(Said { text: reply.text, interrupted: reply.interrupted, is_cut: false })
    })
}

fn converse(
    args: &ChatArgs,
    name: &str,
    mut answer: impl FnMut(&[Value], &AtomicBool) -> Result<Said>,
) -> Result<()> {
    let interrupt = watch_interrupts()?;
    let name = visible(name);
    say(format_args!(
        "{name} — /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops a reply\n"
    ))?;
    let system = || args.system.iter().map(|text| json!({"role": "system", "content": text})).collect();
    let mut messages: Vec<Value> = system();
    while let Some(line) = read_line(&interrupt)? {
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" => break,
            "/reset" => {
                messages = system();
                say("(forgotten)\n")?;
                continue;
            }
            text => messages.push(json!({"role": "user", "content": text})),
        }
        match answer(&messages, &interrupt) {
            Ok(reply) => {
                say(match reply {
                    Said { interrupted: true, .. } => " [stopped]\n",
                    Said { is_cut: true, .. } => " [cut: no tokens left]\n",
                    _ => "\n",
                })?;
                messages.push(json!({"role": "assistant", "content": reply.text}));
            }
            Err(error) if error.is::<Gone>() => return Err(error),
            Err(error) => {
                messages.pop();
                // A server's words may be in it.
                eprintln!("atom: {}", visible(&format!("{error:#}")));
            }
        }
    }
    Ok(())
}

/// An answer of a server's. What the model thinks is for the eyes only: it goes to standard error.
fn hear(remote: &Remote, messages: &[Value], interrupt: &AtomicBool) -> Result<Said> {
    let (dim, plain) = if std::io::stderr().is_terminal() { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
    let mut thinks = false;
    remote.answer(messages, interrupt, |part| match part {
        Part::Reasoning(text) => {
            thinks = true;
            eprint!("{dim}{}{plain}", visible(text));
            Ok(())
        }
        Part::Text(text) => {
            if std::mem::take(&mut thinks) {
                eprintln!();
            }
            say(visible(text))
        }
        Part::Call(_) | Part::Cut => Ok(()),
    })
}

/// What is sent is what the user wrote; flags of a model that runs here mean nothing there.
fn remote_options(url: &str, args: &ChatArgs, given: &ArgMatches) -> Result<RemoteOptions> {
    let is_given = |id: &str| given.value_source(id) == Some(ValueSource::CommandLine);
    let engine = EngineArgs::augment_args(clap::Command::new("engine"));
    let of_engine = engine.get_arguments().filter(|arg| arg.get_id() != "model");
    if let Some(flag) = of_engine.into_iter().find(|arg| is_given(arg.get_id().as_str())) {
        bail!(
            "--{} is for a model that runs here, and --url names a server",
            flag.get_long().unwrap_or_default()
        );
    }
    let mut sampling = Map::new();
    let sampled = &args.sampling;
    for (name, value) in [
        ("temperature", json!(sampled.temperature)),
        ("top_p", json!(sampled.top_p)),
        ("top_k", json!(sampled.top_k)),
        ("max_tokens", json!(sampled.max_tokens)),
    ] {
        if is_given(name) {
            sampling.insert(name.into(), value);
        }
    }
    let of_environment = || std::env::var("OPENAI_API_KEY").ok();
    Ok(RemoteOptions {
        url: url.to_owned(),
        key: args.api_key.clone().or_else(of_environment).filter(|key| !key.is_empty()),
        model: is_given("model").then(|| args.engine.model.clone()),
        sampling,
    })
}

fn render(running: &Running, messages: &[Value]) -> Result<Vec<atom_base::TokenId>> {
    let now_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
    let messages = Value::Array(messages.to_vec());
    let input = TemplateInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        kwargs: None,
        now_unix_s,
    };
    let text = running.text.template.render(&input)?;
    Ok(running.text.tokenizer.encode(&text, false)?)
}

/// The next line; `None` at the end of input.
fn read_line(interrupt: &AtomicBool) -> Result<Option<String>> {
    if std::io::stdin().is_terminal() {
        say("> ")?;
    }
    let mut line = String::new();
    let read = std::io::stdin().lock().read_line(&mut line).context("reading standard input")?;
    // One pressed at the prompt stops nothing.
    interrupt.store(false, Ordering::SeqCst);
    Ok((read > 0).then_some(line))
}

/// Ctrl-C sets the flag instead of ending the program.
fn watch_interrupts() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&flag);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("watching for Ctrl-C")?;
    let watch = async move {
        while tokio::signal::ctrl_c().await.is_ok() {
            set.store(true, Ordering::SeqCst);
        }
    };
    std::thread::Builder::new().name("interrupts".into()).spawn(move || runtime.block_on(watch))?;
    Ok(flag)
}
