//! `POST /v1/chat/completions`: the next message of a conversation.

mod answer;
mod body;

pub(crate) use answer::ChatShape;
pub(crate) use body::read;
