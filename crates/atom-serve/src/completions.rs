//! `POST /v1/completions`: continue a text as it is.

mod answer;
mod body;

pub(crate) use answer::CompletionShape;
pub(crate) use body::{BODY, read};
