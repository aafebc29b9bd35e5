//! An engine that plays scripts, and a server in front of it.

use crate::client::{Client, Response};
use atom_base::{FinishReason, RequestId, ScoredToken, TokenId};
use atom_engine::{EngineLimits, Event, Refusal, Request};
use atom_serve::{
    CacheUse, Condition, Drained, Engine, EventSender, EventStream, Health, LaneHealth, LaneStep, Layout,
    Profile, ProfileRefusal, SeedSource, Server, ServerOptions, TextModel, serve,
};
use atom_text::{
    ChatTemplate, Dialect, GgufVocabulary, ReasoningFormat, Tokenizer, TokenizerSource, ToolFormat,
};
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinHandle;

/// One thing that the engine does for a request.
#[derive(Clone, Debug)]
pub(crate) enum Play {
    Say(Event),
    /// Waits until the test opens the gate once.
    Gate,
    /// Waits while the engine is paused.
    Rest,
    /// Lets everybody else run, so that what was said is read before the rest.
    Yield,
    /// Says nothing for so long.
    Think(Duration),
    /// Goes away without a terminal event. A script that just ends keeps the request open.
    Vanish,
}

type Script = Box<dyn Fn(&Request) -> Vec<Play> + Send + Sync>;

/// Plays `script(request)` for every request.
pub(crate) struct Fake {
    limits: EngineLimits,
    layout: Layout,
    pub(crate) profile: Mutex<Profiling>,
    script: Script,
    pub(crate) gate: Arc<Semaphore>,
    /// Everything that was taken, in order.
    pub(crate) taken: Mutex<Vec<Request>>,
    /// After so many requests, this is the answer.
    refusal: Mutex<Option<(usize, Refusal)>>,
    pub(crate) condition: Mutex<Condition>,
    pub(crate) lanes: Mutex<Vec<LaneHealth>>,
    /// All of them are kept.
    pub(crate) steps: Mutex<Vec<LaneStep>>,
    /// What it was last told.
    pub(crate) paused: watch::Sender<bool>,
    /// In the middle of a step that does not end.
    pub(crate) busy: AtomicBool,
    pub(crate) drained: AtomicBool,
    /// Ids of aborted requests.
    aborted: watch::Sender<Vec<RequestId>>,
    /// Scripts that were played to their end.
    played: Arc<watch::Sender<usize>>,
}

/// Whether steps can be recorded, and are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Profiling {
    Off,
    Ready,
    On,
}

/// A server on a loopback port.
pub(crate) struct Site {
    pub(crate) address: SocketAddr,
    pub(crate) fake: Arc<Fake>,
    stop: Option<oneshot::Sender<()>>,
    serving: JoinHandle<Drained>,
}

impl Fake {
    pub(crate) fn new(script: impl Fn(&Request) -> Vec<Play> + Send + Sync + 'static) -> Self {
        Self {
            limits: EngineLimits {
                max_model_len: 1000,
                cache_tokens: 900,
                queue_max: 32,
                max_num_seqs: 8,
                vocab_size: VOCAB,
                lanes: 2,
                grammars: true,
            },
            layout: Layout {
                device: "paper".into(),
                ranks_per_lane: 1,
                lanes: 2,
                lanes_per_group: 2,
                hosts: 1,
                step_rows: vec![8, 16, 32],
                page_size: 16,
            },
            profile: Mutex::new(Profiling::Off),
            script: Box::new(script),
            gate: Arc::new(Semaphore::new(0)),
            taken: Mutex::default(),
            refusal: Mutex::default(),
            condition: Mutex::new(Condition::Ready),
            lanes: Mutex::default(),
            steps: Mutex::default(),
            paused: watch::Sender::new(false),
            busy: AtomicBool::new(false),
            drained: AtomicBool::new(false),
            aborted: watch::Sender::new(Vec::new()),
            played: Arc::new(watch::Sender::new(0)),
        }
    }

    /// Waits until `count` requests were aborted.
    pub(crate) async fn aborted(&self, count: usize) -> Vec<RequestId> {
        self.aborted.subscribe().wait_for(|ids| ids.len() >= count).await.unwrap().clone()
    }

    pub(crate) fn aborted_now(&self) -> usize {
        self.aborted.borrow().len()
    }

    /// Waits until `count` scripts were played to their end.
    pub(crate) async fn played(&self, count: usize) {
        self.played.subscribe().wait_for(|&played| played >= count).await.unwrap();
    }

    pub(crate) fn request(&self, at: usize) -> Request {
        self.taken.lock().unwrap()[at].clone()
    }

    pub(crate) fn taken_now(&self) -> usize {
        self.taken.lock().unwrap().len()
    }

    pub(crate) fn refuse_after(&self, taken: usize, refusal: Refusal) {
        *self.refusal.lock().unwrap() = Some((taken, refusal));
    }

    async fn play(
        script: Vec<Play>,
        sender: EventSender,
        gate: Arc<Semaphore>,
        mut paused: watch::Receiver<bool>,
        played: Arc<watch::Sender<usize>>,
    ) {
        let mut stays = true;
        for play in script {
            match play {
                Play::Say(event) => {
                    sender.send(event);
                }
                Play::Gate => gate.acquire().await.unwrap().forget(),
                Play::Rest => drop(paused.wait_for(|paused| !paused).await.unwrap()),
                Play::Yield => tokio::task::yield_now().await,
                Play::Think(time) => tokio::time::sleep(time).await,
                Play::Vanish => stays = false,
            }
        }
        played.send_modify(|count| *count += 1);
        if stays {
            // Keeps the sender, and with it the request, as long as the runtime lives.
            std::future::pending::<()>().await;
            drop(sender);
        }
    }
}

impl Engine for Fake {
    fn limits(&self) -> &EngineLimits {
        &self.limits
    }

    fn submit(&self, request: Request) -> Result<EventStream, Refusal> {
        self.limits.check(&request)?;
        let mut taken = self.taken.lock().unwrap();
        if let Some((after, refusal)) = &*self.refusal.lock().unwrap()
            && taken.len() >= *after
        {
            return Err(refusal.clone());
        }
        let (id, aborted) = (request.id, self.aborted.clone());
        let (sender, stream) = EventStream::new(move || aborted.send_modify(|ids| ids.push(id)));
        let script = (self.script)(&request);
        let paused = self.paused.subscribe();
        tokio::spawn(Self::play(script, sender, self.gate.clone(), paused, self.played.clone()));
        taken.push(request);
        Ok(stream)
    }

    fn health(&self) -> Health {
        Health {
            condition: self.condition.lock().unwrap().clone(),
            lanes: self.lanes.lock().unwrap().clone(),
        }
    }

    fn pause(&self) {
        self.paused.send_replace(true);
    }

    fn drain(&self) {
        self.drained.store(true, Ordering::SeqCst);
    }

    fn resume(&self) {
        self.paused.send_replace(false);
    }

    fn is_pausing(&self) -> bool {
        *self.paused.borrow()
    }

    fn is_at_rest(&self) -> bool {
        self.is_pausing() && !self.busy.load(Ordering::SeqCst)
    }

    fn steps_after(&self, seen: &[u64]) -> Vec<LaneStep> {
        let lanes: Vec<_> = self.lanes.lock().unwrap().iter().map(|lane| lane.lane).collect();
        let seen_of = |step: &LaneStep| {
            let place = lanes.iter().position(|&lane| lane == step.lane);
            place.and_then(|place| seen.get(place)).copied().unwrap_or(0)
        };
        self.steps.lock().unwrap().iter().filter(|step| step.number > seen_of(step)).copied().collect()
    }

    fn layout(&self) -> &Layout {
        &self.layout
    }

    fn caches(&self) -> Vec<CacheUse> {
        vec![CacheUse { pages_held: 3, prompt_tokens: 20, cached_tokens: 16, ..CacheUse::default() }]
    }

    fn start_profile(&self) -> Result<(), ProfileRefusal> {
        let mut profile = self.profile.lock().unwrap();
        match *profile {
            Profiling::Ready => {
                *profile = Profiling::On;
                Ok(())
            }
            Profiling::On => Err(ProfileRefusal::Running),
            Profiling::Off => Err(ProfileRefusal::Off),
        }
    }

    fn stop_profile(&self) -> Result<Profile, ProfileRefusal> {
        let mut profile = self.profile.lock().unwrap();
        match *profile {
            Profiling::On => {
                *profile = Profiling::Ready;
                Ok(Profile { file: "profiles/1.json".into(), steps: 12, steps_lost: 0 })
            }
            Profiling::Ready => Err(ProfileRefusal::NotRunning),
            Profiling::Off => Err(ProfileRefusal::Off),
        }
    }

    fn write_metrics(&self, out: &mut String) {
        out.push_str("# TYPE fake_steps_total counter\nfake_steps_total 7\n");
    }
}

impl Site {
    pub(crate) async fn start(script: impl Fn(&Request) -> Vec<Play> + Send + Sync + 'static) -> Self {
        Self::start_with(script, |_| {}).await
    }

    /// In front of a device that can't hold the output to a grammar.
    pub(crate) async fn without_grammars(
        script: impl Fn(&Request) -> Vec<Play> + Send + Sync + 'static,
    ) -> Self {
        let mut fake = Fake::new(script);
        fake.limits.grammars = false;
        Self::serve(fake, text_model(), |_| {}).await
    }

    pub(crate) async fn start_with(
        script: impl Fn(&Request) -> Vec<Play> + Send + Sync + 'static,
        change: impl FnOnce(&mut ServerOptions),
    ) -> Self {
        Self::serve(Fake::new(script), text_model(), change).await
    }

    pub(crate) async fn start_model(
        script: impl Fn(&Request) -> Vec<Play> + Send + Sync + 'static,
        text: TextModel,
        change: impl FnOnce(&mut ServerOptions),
    ) -> Self {
        Self::serve(Fake::new(script), text, change).await
    }

    /// On an address of its own, at which loopback connections arrive too.
    pub(crate) async fn listen(
        address: &str,
        script: impl Fn(&Request) -> Vec<Play> + Send + Sync + 'static,
        change: impl FnOnce(&mut ServerOptions),
    ) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        Self::serve_on(listener, Fake::new(script), text_model(), change)
    }

    async fn serve(fake: Fake, text: TextModel, change: impl FnOnce(&mut ServerOptions)) -> Self {
        Self::serve_on(TcpListener::bind("127.0.0.1:0").await.unwrap(), fake, text, change)
    }

    fn serve_on(
        listener: TcpListener,
        fake: Fake,
        text: TextModel,
        change: impl FnOnce(&mut ServerOptions),
    ) -> Self {
        let fake = Arc::new(fake);
        let mut options = ServerOptions::new("tiny", SeedSource::new(7));
        options.aliases = vec!["org/tiny-1".into()];
        change(&mut options);
        let server = Server::new(fake.clone(), text, options);
        let port = listener.local_addr().unwrap().port();
        let address = SocketAddr::from(([127, 0, 0, 1], port));
        let (stop, stopped) = oneshot::channel();
        let serving = tokio::spawn(serve(listener, server, async {
            let _ = stopped.await;
        }));
        Self { address, fake, stop: Some(stop), serving }
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(self.address).await
    }

    /// One request on a connection of its own.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> Response {
        self.client().await.post(path, body).await
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.client().await.get(path).await
    }

    /// Tells the server to drain.
    pub(crate) fn stop(&mut self) {
        self.stop.take().unwrap().send(()).unwrap();
    }

    /// Waits for the end of the drain.
    pub(crate) async fn ended(self) -> Drained {
        self.serving.await.unwrap()
    }
}

/// Ids below 256 are the bytes; then come the special tokens.
pub(crate) const IM_START: TokenId = 256;
pub(crate) const IM_END: TokenId = 257;
pub(crate) const BOS: TokenId = 258;
/// The model knows a few more ids than the tokenizer, as padded embeddings do.
const VOCAB: usize = 264;

pub(crate) fn text_model() -> TextModel {
    text_model_with(TEMPLATE, Dialect::default(), &[])
}

/// A model that knows tools and thinks: markers of Hermes and of thoughts are special tokens.
pub(crate) fn tool_model() -> TextModel {
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Think), tools: Some(ToolFormat::Hermes) };
    text_model_with(TOOL_TEMPLATE, dialect, &MARKERS)
}

/// A model with this template. `markers` are special tokens from 259 on, four at the most.
pub(crate) fn text_model_with(template: &str, dialect: Dialect, markers: &[&str]) -> TextModel {
    let mut tokens: Vec<String> = byte_alphabet().iter().map(char::to_string).collect();
    let mut token_types = vec![1; tokens.len()];
    for special in ["<|im_start|>", "<|im_end|>", "<s>"].iter().chain(markers) {
        tokens.push((*special).into());
        token_types.push(3);
    }
    let vocabulary = GgufVocabulary {
        model: "gpt2".into(),
        pre: "gpt-2".into(),
        tokens,
        token_types,
        bos: Some(BOS),
        eos: Some(IM_END),
        add_bos: Some(true),
        chat_template: Some(template.into()),
        ..Default::default()
    };
    let source = TokenizerSource::Gguf(vocabulary);
    let tokenizer = Arc::new(Tokenizer::load(&source).unwrap());
    let template = ChatTemplate::load(&source, &tokenizer, None).unwrap();
    TextModel::new(tokenizer, template, dialect)
}

/// See [`tool_model`].
pub(crate) const MARKERS: [&str; 4] = ["<tool_call>", "</tool_call>", "<think>", "</think>"];

pub(crate) const TOOL_TEMPLATE: &str = "\
    {%- if tools %}<|im_start|>system{% for t in tools %}{{ '\\n' }}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}\
    {%- for m in messages %}<|im_start|>{{ m.role }}{{ '=' ~ m.tool_call_id if m.tool_call_id }}{{ '\\n' }}\
    {%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\
    {%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}\
    {%- for key, value in c.function.arguments | items %} {{ key }}={{ value | tojson }}{% endfor %}</tool_call>\
    {%- endfor %}<|im_end|>\n{% endfor %}\
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}\
    {%- if enable_thinking is defined %}{{ '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}\
    {%- endif %}{% endif %}";

pub(crate) const TEMPLATE: &str = "{% for m in messages %}\
    {% if loop.index0 > 0 and m.role == 'system' %}{{ raise_exception('system comes first') }}{% endif %}\
    <|im_start|>{{ m.role }}{{ '=' ~ m.name if m.name else '' }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if hint %}{{ hint }}{% endif %}";

/// How a byte-level vocabulary writes each byte: printable Latin-1 as itself, the rest from U+0100.
fn byte_alphabet() -> Vec<char> {
    let mut next = 0x100;
    (0..=255u8)
        .map(|byte| match byte {
            b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
            _ => {
                next += 1;
                char::from_u32(next - 1).unwrap()
            }
        })
        .collect()
}

/// A token that is worth `-token / 64`, with the alternatives that were asked for: its neighbours.
pub(crate) fn scored(token: TokenId, top: Option<u8>) -> ScoredToken {
    let logprob = |token: TokenId| -(token as f32) / 64.0;
    let mut scored = ScoredToken::bare(token);
    if let Some(count) = top {
        scored.logprob = logprob(token);
        for id in (0..TokenId::from(count)).map(|k| token.saturating_sub(1) + k) {
            scored.top.push(id, logprob(id));
        }
    }
    scored
}

/// What a well-behaved engine plays: the prompt's scores if they are asked for, then the tokens up to the
/// limit.
pub(crate) fn answer(request: &Request, tokens: &[TokenId]) -> Vec<Play> {
    let mut plays = vec![Event::Started { cached_tokens: 3 }];
    if let Some(top) = request.sampling.prompt_logprobs {
        let scores = request.prompt.iter().enumerate().skip(1);
        plays.extend(
            scores.map(|(at, &token)| Event::PromptScored {
                index: at as u32,
                scored: scored(token, Some(top)),
            }),
        );
    }
    let limit = request.stop.max_tokens as usize;
    let ends = |token: &TokenId| {
        request.stop.stop_token_ids.contains(token) || (*token == IM_END && !request.stop.ignore_eos)
    };
    let end = tokens.iter().position(ends).unwrap_or(tokens.len());
    plays.extend(
        tokens[..end.min(limit)].iter().map(|&token| Event::Token(scored(token, request.sampling.logprobs))),
    );
    plays.push(Event::Finished(if end < limit { FinishReason::Stop } else { FinishReason::Length }));
    plays.into_iter().map(Play::Say).collect()
}

/// A script that answers every request with a text.
pub(crate) fn says(text: &'static str) -> impl Fn(&Request) -> Vec<Play> + Send + Sync + 'static {
    move |request| answer(request, &bytes(text))
}

pub(crate) fn bytes(text: &str) -> Vec<TokenId> {
    text.bytes().map(TokenId::from).collect()
}

/// Longer than any test runs, shorter than a hang of the whole suite.
pub(crate) const DRAIN: Duration = Duration::from_secs(60);
