//! The whole server over a loopback socket, in front of an engine that plays scripts.

// All of it is test code, where a surprise may end the test.
#![allow(clippy::unwrap_used)]

mod admin;
mod answers;
mod bad_input;
mod client;
mod cors;
mod equality;
mod fake;
mod keys;
mod lifecycle;
mod patience;
mod request_log;
mod scoring;
mod status;
mod streams;
mod tls;
mod transport;
