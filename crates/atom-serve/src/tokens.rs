//! Text to tokens and back, without a model: `POST /tokenize` and `/detokenize` in vLLM's shapes, its
//! `GET /tokenizer_info`, and the `/render` beside each generating endpoint, which gives the tokens that the
//! same body would be computed from.

use crate::declare::Takes::{Flag, List, Only, Text, Token};
use crate::declare::{Field, Object, field, idle, needed};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::params::{MODEL, token_id};
use crate::prompt::encode;
use crate::routes::{ReadBody, understand};
use crate::server::Server;
use crate::{body, chat, completions, generation, status};
use atom_base::TokenId;
use axum::body::Body;
use axum::extract::State;
use axum::http::Request;
use axum::response::Response;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `POST /tokenize`: of a text (`prompt`) or of a conversation (`messages`).
pub(crate) async fn tokenize(
    State(server): State<Arc<Server>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let _running = server.phases.begin().ok_or(ApiError::Draining)?;
    let bytes = body::read(&server, request).await?;
    let answer = server.on_text_thread(move |server| {
        let fields = Fields::parse(&bytes, &EITHER)?;
        let asked = Asked::read(fields, server)?;
        let strings = |token: &TokenId| server.text.tokenizer.written(*token);
        Ok(json!({
            "count": asked.tokens.len(),
            "max_model_len": server.context(),
            "tokens": *asked.tokens,
            "token_strs": asked.with_strings.then(|| asked.tokens.iter().map(strings).collect::<Vec<_>>()),
        }))
    });
    Ok(status::json(answer.await?))
}

/// `POST /detokenize`.
pub(crate) async fn detokenize(
    State(server): State<Arc<Server>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let _running = server.phases.begin().ok_or(ApiError::Draining)?;
    let bytes = body::read(&server, request).await?;
    let answer = server.on_text_thread(move |server| {
        let mut fields = Fields::parse(&bytes, &DETOKENIZE)?;
        server.resolve_model(fields.string("model")?)?;
        let items = fields
            .list("tokens")?
            .ok_or(ApiError::Missing { name: "tokens".into(), expected: "send a list of token ids" })?;
        fields.finish()?;
        let vocab = server.engine.limits().vocab_size;
        let tokens = items.iter().enumerate().map(|(at, id)| token_id(&format!("tokens[{at}]"), id, vocab));
        let tokens = tokens.collect::<Result<Vec<TokenId>, ApiError>>()?;
        Ok(json!({"prompt": server.text.tokenizer.decode(&tokens, false)}))
    });
    Ok(status::json(answer.await?))
}

/// `GET /tokenizer_info`: what a `tokenizer_config.json` of this model would say. Clients that count tokens by
/// `/tokenize` ask for it first.
pub(crate) async fn tokenizer_info(State(server): State<Arc<Server>>) -> Response {
    let (tokenizer, template) = (&server.text.tokenizer, &server.text.template);
    let mut info = Map::new();
    for name in SPECIAL_TOKENS {
        info.insert(name.into(), Value::Null);
    }
    info.extend(tokenizer.special_texts().map(|(name, text)| (name.to_owned(), text.into())));
    info.insert("add_bos_token".into(), tokenizer.puts_bos().into());
    info.insert("model_max_length".into(), server.context().into());
    info.insert("chat_template".into(), template.text().into());
    status::json(Value::Object(info))
}

/// `POST /v1/chat/completions/render`: one object, since a conversation is one prompt.
pub(crate) async fn render_chat(
    State(server): State<Arc<Server>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let mut rendered = rendered(&server, request, chat::read, "chatcmpl").await?;
    Ok(status::json(rendered.pop().expect("there is at least one prompt")))
}

/// `POST /v1/completions/render`: a list, with an object for every prompt.
pub(crate) async fn render_completions(
    State(server): State<Arc<Server>>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let rendered = rendered(&server, request, completions::read, "cmpl").await?;
    Ok(status::json(Value::Array(rendered)))
}

/// The prompts of a request that could be generated from: others are refused as they would be there.
async fn rendered<S: Send + 'static>(
    server: &Arc<Server>,
    request: Request<Body>,
    read: ReadBody<S>,
    prefix: &'static str,
) -> Result<Vec<Value>, ApiError> {
    let _running = server.phases.begin().ok_or(ApiError::Draining)?;
    let bytes = body::read(server, request).await?;
    let text_work = move |server: &Server| {
        let (work, _) = understand(server, read, &bytes)?;
        generation::check(server, &work)?;
        let prompts = work.prompts.iter().map(|prompt| {
            json!({
                "request_id": server.answer_id(prefix),
                "model": work.params.model,
                "token_ids": *prompt.tokens,
                "max_tokens": prompt.max_tokens,
            })
        });
        Ok(prompts.collect())
    };
    server.on_text_thread(text_work).await
}

/// The tokens that a body of `/tokenize` asks for.
struct Asked {
    tokens: Arc<[TokenId]>,
    with_strings: bool,
}

impl Asked {
    fn read(mut fields: Fields, server: &Server) -> Result<Self, ApiError> {
        let with_strings = fields.boolean("return_token_strs")?.unwrap_or(false);
        let tokens = match (fields.take("prompt"), fields.take("messages")) {
            (Some(Value::String(text)), None) => {
                fields.is_declared_as(&TOKENIZE_TEXT);
                server.resolve_model(fields.string("model")?)?;
                let add_special = fields.boolean("add_special_tokens")?.unwrap_or(true);
                fields.finish()?;
                encode(server, &text, add_special)?
            }
            (None, Some(messages)) => Self::of_messages(fields, messages, server)?,
            (None, None) => {
                return Err(ApiError::Missing {
                    name: "prompt".into(),
                    expected: "send a text, or a conversation as 'messages'",
                });
            }
            (Some(_), Some(messages)) => return Err(wrong("messages", &messages, "absent beside 'prompt'")),
            (Some(other), None) => return Err(wrong("prompt", &other, "a string")),
        };
        Ok(Self { tokens, with_strings })
    }

    /// Read as a chat request of these fields, so that the tokens are those of one.
    fn of_messages(mut fields: Fields, messages: Value, server: &Server) -> Result<Arc<[TokenId]>, ApiError> {
        fields.is_declared_as(&TOKENIZE_MESSAGES);
        fields.take_idle()?;
        let mut chat = Map::new();
        chat.insert("messages".into(), messages);
        for field in [MODEL].iter().chain(chat::PROMPT_FIELDS) {
            if let Some(value) = fields.take(field.name) {
                chat.insert(field.name.into(), value);
            }
        }
        fields.finish()?;
        // A prompt that fills the context has tokens too; without this field there must be room behind it.
        chat.insert("max_tokens".into(), 1.into());
        let (mut work, _) = chat::read(server, Value::Object(chat).to_string().as_bytes())?;
        Ok(work.prompts.pop().expect("a conversation is one prompt").tokens)
    }
}

/// Those that a model may lack are null.
const SPECIAL_TOKENS: [&str; 4] = ["bos_token", "eos_token", "unk_token", "pad_token"];

/// What a body of `/tokenize` may have.
pub(crate) const TOKENIZE: &[&Object] = &[&TOKENIZE_TEXT, &TOKENIZE_MESSAGES];

/// One of them, before it is known which.
const EITHER: Object =
    Object { name: "TokenizeRequest", groups: &[&[field("prompt", Text, ""), chat::MESSAGES, WITH_STRINGS]] };
const TOKENIZE_TEXT: Object = Object {
    name: "TokenizeTextRequest",
    groups: &[&[
        needed("prompt", Text, "A text."),
        field("add_special_tokens", Flag, "False: without the tokenizer's own BOS."),
        WITH_STRINGS,
        MODEL,
    ]],
};
const TOKENIZE_MESSAGES: Object = Object {
    name: "TokenizeMessagesRequest",
    groups: &[
        &[
            chat::MESSAGES,
            idle("add_special_tokens", Only(&["false"], "the chat template writes the special tokens")),
            WITH_STRINGS,
            MODEL,
        ],
        chat::PROMPT_FIELDS,
    ],
};
const WITH_STRINGS: Field =
    field("return_token_strs", Flag, "`token_strs` says how the vocabulary writes each token.");

/// What a body of `/detokenize` may have.
pub(crate) const DETOKENIZE: Object = Object {
    name: "DetokenizeRequest",
    groups: &[&[needed("tokens", List(&Token, 0, usize::MAX), "Tokens of the vocabulary."), MODEL]],
};
