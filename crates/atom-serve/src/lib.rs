//! The HTTP server: the APIs of OpenAI and Anthropic in front of an engine.
//!
//! * [`Engine`] is what it asks of the engine: take a [`Request`](atom_engine::Request), give an
//!   [`EventStream`]; say how it is ([`Health`]); write its metrics. The binary implements it over the rank
//!   threads, the tests over scripts.
//! * [`Server`] is one model behind one address; [`router`] has its routes and [`serve`] runs them on a
//!   listener until it is told to stop, then drains.
//!
//! Below the routes, a connection (`connection`) is a `Wire` that hyper speaks HTTP over, and an `Exchange`
//! that says where it stands: they see to peers that send or take nothing, and answer what is no HTTP. Above
//! them come, in this order, the id, the count and the request log (`routes::observe`), CORS, the names by which a
//! server without keys may be asked (`hosts`), and the keys.
//!
//! The way of a request: the body is read within bounds (`body`), taken apart field by field on a text
//! thread (`fields`, `params`, `chat`, `completions`, `responses`, `messages`), turned into tokens (`prompt`),
//! submitted as one engine request per choice (`generation`), each held to what `constraint` has compiled; each
//! choice turns events into pieces of text
//! (`choice`); a `Shape` makes JSON of them, whole or as a stream (`stream`).
//!
//! The page at `/` (`ui`) is a client like any other; beside the API it asks for the last steps of every lane.
//!
//! What holds:
//! * A field acts or is refused by name. What this server doesn't know is an error, never ignored. Names, types and
//!   bounds are data (`declare`), from which bodies are read and the OpenAPI document (`openapi`) is made.
//! * A stream and a whole answer are made of the same pieces, so they can't say different things.
//! * Every error is `{"error": {message, type, param, code}}` with the numbers in the message, and on the paths
//!   of `messages` what Anthropic's clients expect instead.
//! * A client that goes away drops its streams, and with them the engine's work, at once.
//! * Nothing here blocks the reactor: text work runs on a bounded number of threads of its own.
//!
//! This crate must never know a page, a rank, a device or a kernel, nor read arguments and environment.

#![forbid(unsafe_code)]

mod admin;
mod auth;
mod body;
mod chat;
mod choice;
mod completions;
mod connection;
mod constraint;
mod cors;
mod declare;
mod engine;
mod error;
mod exchange;
mod fields;
mod generation;
mod hosts;
mod inside;
mod json;
mod kept;
mod messages;
mod openapi;
mod params;
mod phase;
mod prompt;
mod record;
mod redact;
mod report;
mod request_log;
mod responses;
mod routes;
mod serve;
mod server;
mod shape;
mod status;
mod stream;
#[cfg(test)]
mod testing;
mod text;
mod tls;
mod tokens;
mod ui;
mod wire;

pub use auth::{ApiKeys, KeyError};
pub use cors::{CorsOrigins, OriginError};
pub use engine::{Condition, Engine, EventSender, EventStream, Health, LaneHealth, LaneStep, RequestIds};
pub use hosts::{AllowedHosts, HostError};
pub use report::{CacheUse, Layout, Profile, ProfileRefusal};
pub use request_log::LogSink;
pub use routes::router;
pub use serve::{Drained, serve};
pub use server::{SamplingDefaults, SeedSource, Server, ServerOptions};
pub use text::TextModel;
pub use tls::{Tls, TlsError};
