//! The whole server over a loopback socket, in front of an engine that plays scripts.

// All of it is test code, where a surprise may end the test.
#![allow(clippy::unwrap_used)]

mod admin;
mod agents;
mod allowed_tools;
mod answers;
mod api_table;
mod bad_input;
mod bad_tools;
mod client;
mod codex;
mod constraints;
mod cors;
mod cut_calls;
mod document;
mod equality;
mod fake;
mod hosts;
mod inside;
mod keys;
mod lifecycle;
mod messages;
mod openapi;
mod parts;
mod patience;
mod request_log;
mod responses;
mod rows;
mod scoring;
mod status;
mod streams;
mod tls;
mod tokens;
mod tools;
mod transport;
mod ui;
