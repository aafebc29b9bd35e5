//! The whole server over a loopback socket, in front of an engine that plays scripts.

// All of it is test code, where a surprise may end the test.
#![allow(clippy::unwrap_used)]

mod admin;
mod answers;
mod api_table;
mod bad_input;
mod bad_tools;
mod client;
mod equality;
mod fake;
mod inside;
mod lifecycle;
mod parts;
mod scoring;
mod status;
mod streams;
mod tokens;
mod tools;
mod ui;
