//! The HTTP server: the OpenAI API in front of an engine.
//!
//! * [`Engine`] is what it asks of the engine: take a [`Request`](atom_engine::Request), give an
//!   [`EventStream`]; say how it is ([`Health`]); write its metrics. The binary implements it over the rank
//!   threads, the tests over scripts.
//! * [`Server`] is one model behind one address; [`router`] has its routes and [`serve`] runs them on a
//!   listener until it is told to stop, then drains.
//!
//! The way of a request: the body is read within bounds (`body`), taken apart field by field on a text
//! thread (`fields`, `params`, `chat::body`, `completions::body`), turned into tokens (`prompt`), submitted
//! as one engine request per choice (`generation`), each held to what `constraint` has compiled; each choice turns events into pieces of text
//! (`choice`); a `Shape` makes JSON of them, whole or as a stream (`stream`).
//!
//! What holds:
//! * A field acts or is refused by name. What this server doesn't know is an error, never ignored.
//! * A stream and a whole answer are made of the same pieces, so they can't say different things.
//! * Every error is `{"error": {message, type, param, code}}` with the numbers in the message.
//! * A client that goes away drops its streams, and with them the engine's work, at once.
//! * Nothing here blocks the reactor: text work runs on a bounded number of threads of its own.
//!
//! This crate must never know a page, a rank, a device or a kernel, nor read arguments and environment.

#![forbid(unsafe_code)]

mod admin;
mod body;
mod chat;
mod choice;
mod completions;
mod constraint;
mod engine;
mod error;
mod fields;
mod generation;
mod params;
mod phase;
mod prompt;
mod routes;
mod serve;
mod server;
mod shape;
mod status;
mod stream;

pub use engine::{Condition, Engine, EventSender, EventStream, Health, LaneHealth, RequestIds};
pub use routes::router;
pub use serve::{Drained, serve};
pub use server::{SamplingDefaults, SeedSource, Server, ServerOptions, TextModel};
