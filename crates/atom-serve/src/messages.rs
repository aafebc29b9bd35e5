//! `POST /v1/messages` and `/v1/messages/count_tokens`: the Anthropic API over the same work as a chat.

mod answer;
mod blocks;
mod body;
mod content;
mod error;
mod signature;
mod thinking;
mod tools;

pub(crate) use answer::MessagesShape;
pub(crate) use body::{BODY, COUNT, count, read};
pub(crate) use error::reshape;
