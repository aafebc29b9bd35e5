//! `atom chat`: a conversation in the terminal. Ctrl-C stops a reply and not the program.

use crate::args::ChatArgs;
use crate::generate::Speaker;
use crate::launch::{Running, launch};
use crate::output::{Gone, say};
use anyhow::{Context, Result, ensure};
use atom_text::TemplateInput;
use serde_json::{Value, json};
use std::io::{BufRead, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

/// Reads a line, answers, and so on.
pub(crate) fn run(args: &ChatArgs) -> Result<()> {
    let running = launch(&args.engine)?;
    ensure!(
        running.text.template.is_present(),
        "this model has no chat template; give one with --chat-template, or use `atom generate`"
    );
    let interrupt = watch_interrupts()?;
    let name = &running.served_name;
    say(format_args!(
        "{name} — /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops a reply\n"
    ))?;
    let system = || args.system.iter().map(|text| json!({"role": "system", "content": text})).collect();
    let mut messages: Vec<Value> = system();
    let mut speaker = Speaker::new(&running);
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
        let prompt = render(&running, &messages)?;
        match speaker.speak("", &prompt, &args.sampling, &interrupt) {
            Ok(reply) => {
                say(if reply.interrupted { " [stopped]\n" } else { "\n" })?;
                messages.push(json!({"role": "assistant", "content": reply.text}));
            }
            Err(error) if error.is::<Gone>() => return Err(error),
            Err(error) => {
                messages.pop();
                eprintln!("atom: {error:#}");
            }
        }
    }
    Ok(())
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
