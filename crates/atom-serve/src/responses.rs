//! `POST /v1/responses`: the younger OpenAI API over the same work as a chat, without its memory.

mod answer;
mod body;
mod custom;
mod input;
mod items;
mod tools;

pub(crate) use answer::ResponsesShape;
pub(crate) use body::{BODY, read};
