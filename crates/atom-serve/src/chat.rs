//! `POST /v1/chat/completions`: the next message of a conversation, and what other APIs of conversations
//! read alike.

mod answer;
mod body;
pub(crate) mod conversation;
pub(crate) mod history;
mod messages;
pub(crate) mod thinking;
pub(crate) mod tools;

pub(crate) use answer::ChatShape;
pub(crate) use body::{BODY, MESSAGES, PROMPT_FIELDS, read};
