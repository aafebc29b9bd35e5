//! `atom generate`, and what it shares with `atom chat`: one request, its text as it comes.

use crate::args::{GenerateArgs, SamplingArgs};
use crate::launch::{Running, launch};
use crate::output::{say, visible};
use anyhow::{Context, Result, ensure};
use atom_base::{FinishReason, RequestId, SamplingParams, StopParams, TokenId};
use atom_engine::{Event, Request};
use atom_text::Detokenizer;
use std::io::{IsTerminal, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Completes one prompt.
pub(crate) fn run(args: &GenerateArgs) -> Result<()> {
    let prompt = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None => read_stdin()?,
    };
    let running = launch(&args.engine)?;
    let tokens = running.text.tokenizer.encode(&prompt, true)?;
    ensure!(!tokens.is_empty(), "the prompt is empty: give one as an argument or on standard input");
    let mut speaker = Speaker::new(&running);
    // What goes into a file or a program is the text as it is.
    speaker.for_eyes = std::io::stdout().is_terminal();
    speaker.ignore_eos = args.ignore_eos;
    let never = AtomicBool::new(false);
    let reply = speaker.speak(&prompt, &tokens, &args.sampling, &never)?;
    say("\n")?;
    if args.stats {
        eprintln!("{}", reply.speed());
    }
    Ok(())
}

fn read_stdin() -> Result<String> {
    if std::io::stdin().is_terminal() {
        eprintln!("(reading the prompt from the terminal; Ctrl-D ends it)");
    }
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .context("reading the prompt from standard input (it must be UTF-8)")?;
    Ok(text)
}

/// Sends requests to a host and prints their text.
pub(crate) struct Speaker<'a> {
    running: &'a Running,
    next: u64,
    pub(crate) ignore_eos: bool,
    /// Control characters of the model's are shown and not sent.
    pub(crate) for_eyes: bool,
}

/// What came of one request.
pub(crate) struct Reply {
    pub(crate) text: String,
    pub(crate) interrupted: bool,
    prompt_tokens: usize,
    cached_tokens: u32,
    tokens: usize,
    first: Duration,
    all: Duration,
}

impl<'a> Speaker<'a> {
    pub(crate) fn new(running: &'a Running) -> Self {
        Self { running, next: 0, ignore_eos: false, for_eyes: true }
    }

    /// Prints `lead` once the request is taken, then the continuation of `prompt` as it comes, until it ends
    /// or `interrupt` is set.
    pub(crate) fn speak(
        &mut self,
        lead: &str,
        prompt: &[TokenId],
        args: &SamplingArgs,
        interrupt: &AtomicBool,
    ) -> Result<Reply> {
        let start = Instant::now();
        let (id, events) = self.submit(prompt, args)?;
        say(lead)?;
        let mut text = Detokenizer::new(Arc::clone(&self.running.text.tokenizer), true);
        let mut reply = Reply {
            text: String::new(),
            interrupted: false,
            prompt_tokens: prompt.len(),
            cached_tokens: 0,
            tokens: 0,
            first: Duration::ZERO,
            all: Duration::ZERO,
        };
        loop {
            if interrupt.swap(false, Ordering::SeqCst) {
                self.running.host.abort(id);
                reply.interrupted = true;
                break;
            }
            match events.recv_timeout(LOOK_EVERY) {
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => anyhow::bail!("the engine went away"),
                Ok(Event::Started { cached_tokens }) => reply.cached_tokens = cached_tokens,
                Ok(Event::PromptScored { .. }) => {}
                Ok(Event::Token(token)) => {
                    if reply.tokens == 0 {
                        reply.first = start.elapsed();
                    }
                    reply.tokens += 1;
                    reply.show(text.push(token.token), self.for_eyes)?;
                }
                Ok(Event::Finished(FinishReason::Stop | FinishReason::Length | FinishReason::Aborted)) => {
                    break;
                }
                Ok(Event::Failed(error)) => return Err(error.into()),
            }
        }
        reply.show(text.finish(), self.for_eyes)?;
        reply.all = start.elapsed();
        Ok(reply)
    }

    fn submit(
        &mut self,
        prompt: &[TokenId],
        args: &SamplingArgs,
    ) -> Result<(RequestId, mpsc::Receiver<Event>)> {
        let limits = self.running.host.limits();
        let room = limits.max_model_len.min(limits.cache_tokens);
        let left = room.saturating_sub(prompt.len());
        ensure!(left > 0, "the text is {} tokens long and the model can hold {room}", prompt.len());
        let sampling = SamplingParams {
            temperature: args.temperature,
            top_p: args.top_p,
            top_k: args.top_k,
            seed: self.running.seed.wrapping_add(self.next),
            ..SamplingParams::default()
        };
        sampling.validate(limits.vocab_size as u32)?;
        let stop = StopParams {
            max_tokens: args.max_tokens.unwrap_or(left as u32),
            ignore_eos: self.ignore_eos,
            ..StopParams::default()
        };
        let id = RequestId(self.next);
        self.next += 1;
        let request = Request {
            id,
            prompt: prompt.into(),
            sampling: Arc::new(sampling),
            stop,
            lane: None,
            session: None,
            grammar: None,
        };
        let (sender, events) = mpsc::channel();
        self.running.host.submit(request, Box::new(move |event| drop(sender.send(event))))?;
        Ok((id, events))
    }
}

impl Reply {
    /// One line: tokens per second of both phases.
    pub(crate) fn speed(&self) -> String {
        let decoding = (self.all - self.first).as_secs_f64();
        format!(
            "prompt {} tokens ({} cached), first token after {:.0} ms ({:.0} tokens/s); {} tokens generated, {:.1} tokens/s",
            self.prompt_tokens,
            self.cached_tokens,
            self.first.as_secs_f64() * 1e3,
            (self.prompt_tokens - self.cached_tokens as usize) as f64 / self.first.as_secs_f64().max(1e-9),
            self.tokens,
            self.tokens.saturating_sub(1) as f64 / decoding.max(1e-9),
        )
    }

    fn show(&mut self, delta: &str, for_eyes: bool) -> Result<()> {
        self.text.push_str(delta);
        if for_eyes { say(visible(delta)) } else { say(delta) }
    }
}

/// How soon an interrupt is seen while nothing comes.
const LOOK_EVERY: Duration = Duration::from_millis(50);
