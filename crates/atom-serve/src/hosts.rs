//! By which names a server may be asked that has no keys and listens on the loopback interface only.
//!
//! What protects it is that nobody else can reach it. A web page can: its owner lets the page's own name lead to
//! 127.0.0.1 once it is loaded (DNS rebinding), and the browser takes the server for the page's own. It says that
//! name as `Host` all the same. So names are refused that are none of this machine's; addresses are not, since
//! there is no name to rebind.

use crate::cors::CorsOrigins;
use crate::error::ApiError;
use crate::server::Server;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, Request, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use thiserror::Error;

/// Names beside those of every machine by which a server without keys may be asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedHosts {
    any: bool,
    /// In lower case, without a dot at the end.
    names: Vec<String>,
}

/// The operator's fault, found at start.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum HostError {
    /// Something that is never a `Host`'s name, so that it would never act.
    #[error("'{got}' is no host name; write it without scheme and port, like llm.example.com, or *")]
    NotAName {
        /// What was given.
        got: String,
    },
    /// One says every name, another some name.
    #[error("* allows every name already; leave '{other}' out, or *")]
    AnyAndOne {
        /// The other one.
        other: String,
    },
}

impl AllowedHosts {
    /// Takes names, or `*` alone for every name there is.
    pub fn new<H: AsRef<str>>(names: impl IntoIterator<Item = H>) -> Result<Self, HostError> {
        let mut allowed = Self::default();
        for name in names {
            match name.as_ref() {
                "*" => allowed.any = true,
                name if is_name(name) => allowed.names.push(plain(name)),
                name => return Err(HostError::NotAName { got: name.to_owned() }),
            }
        }
        match allowed.names.first() {
            Some(other) if allowed.any => Err(HostError::AnyAndOne { other: other.clone() }),
            _ => Ok(allowed),
        }
    }

    /// True when whoever can reach the server may call it what he likes.
    pub(crate) fn is_any(&self) -> bool {
        self.any
    }

    /// True for `HOST` or `HOST:PORT` where the host is an address, a name that leads to this machine on every
    /// machine, or one of ours.
    fn admit(&self, authority: &str) -> bool {
        let authority = authority.trim();
        if let Some(rest) = authority.strip_prefix('[') {
            return rest
                .split_once(']')
                .is_some_and(|(v6, port)| v6.parse::<Ipv6Addr>().is_ok() && is_port(port));
        }
        let (name, port) = authority.split_at(authority.find(':').unwrap_or(authority.len()));
        if !is_port(port) {
            return false;
        }
        let name = plain(name);
        name.parse::<IpAddr>().is_ok()
            || name == LOCALHOST
            || name.strip_suffix(LOCALHOST).is_some_and(|rest| rest.ends_with('.'))
            || CONTAINER_NAMES.contains(&&*name)
            || self.names.contains(&name)
    }

    /// The first thing about a request that says somebody else's name.
    fn stranger(&self, uri: &Uri, headers: &HeaderMap, cors: &CorsOrigins) -> Option<String> {
        let hosts = headers.get_all(header::HOST).iter().map(|host| String::from_utf8_lossy(host.as_bytes()));
        // A whole URI in the place of a path counts instead of the header.
        let authority = uri.authority().map(|authority| authority.as_str().into());
        if let Some(host) = hosts.chain(authority).find(|host| !self.admit(host)) {
            return Some(host.into_owned());
        }
        // Browsers say whose page it is that asks. That a page behind a proxy has another name is not seen here, so
        // only pages of other sites are refused.
        let is_cross = headers.get(SEC_FETCH_SITE).is_some_and(|site| site == "cross-site");
        let origin = headers.get(header::ORIGIN).filter(|origin| is_cross && !cors.admit(origin))?;
        let origin = String::from_utf8_lossy(origin.as_bytes());
        let is_ours = origin.split_once("://").is_some_and(|(_, authority)| self.admit(authority));
        (!is_ours).then(|| origin.into_owned())
    }
}

/// Letters, digits, dashes, underscores and dots, as in names that people give to machines.
fn is_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    !plain(name).is_empty() && name.bytes().all(fits)
}

/// Nothing, or `:PORT`.
fn is_port(text: &str) -> bool {
    let digits = text.strip_prefix(':');
    text.is_empty() || digits.is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))
}

fn plain(name: &str) -> String {
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

/// Refuses who asks by a name of somebody else's. Asked before a body is read.
pub(crate) async fn check(State(server): State<Arc<Server>>, request: Request<Body>, next: Next) -> Response {
    let options = &server.options;
    if crate::auth::is_open_path(request.uri().path()) {
        return next.run(request).await;
    }
    match options.hosts.stranger(request.uri(), request.headers(), &options.cors) {
        None => next.run(request).await,
        Some(named) => {
            let named = named.chars().take(SHOWN_CHARS_MAX).collect();
            ApiError::HostNotAllowed { named }.into_response()
        }
    }
}

/// RFC 6761, 6.3: leads to the machine itself, and so does what ends with it.
const LOCALHOST: &str = "localhost";
/// What containers of Docker and Podman call the machine that they run on. The top-level domain is nobody's.
const CONTAINER_NAMES: [&str; 2] = ["host.docker.internal", "host.containers.internal"];
pub(crate) const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const SHOWN_CHARS_MAX: usize = 128;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_and_names_of_this_machine_are_known_and_others_have_to_be_named() {
        let hosts = AllowedHosts::new(["llm.example.com", "Box."]).unwrap();
        for fine in [
            "localhost",
            "LocalHost:8000",
            "app.localhost:1",
            "localhost.",
            "127.0.0.1:8000",
            "127.8.9.1",
            "[::1]",
            "[::1]:8000",
            "192.168.1.5:8000",
            "host.docker.internal:8000",
            "llm.example.com",
            "LLM.example.com.:443",
            "box:8000",
        ] {
            assert!(hosts.admit(fine), "{fine}");
        }
        for stranger in [
            "",
            "evil.example",
            "localhost.evil.example",
            "evillocalhost",
            "127.0.0.1.evil.example",
            "sub.llm.example.com",
            "[evil]:80",
            "[::1",
            "user@localhost",
            "localhost:80@evil.example",
            "localhost:80.evil.example",
            "[::1].evil.example",
            "[::1]:x",
            "docker.internal",
        ] {
            assert!(!hosts.admit(stranger), "{stranger}");
        }
        for wrong in ["", ".", "https://a.example", "a.example:80", "a b", "*.example.com", "[::1]"] {
            let refused = AllowedHosts::new([wrong]).unwrap_err();
            assert_eq!(refused, HostError::NotAName { got: wrong.into() });
        }
        assert!(AllowedHosts::new(["*"]).unwrap().is_any());
        assert_eq!(AllowedHosts::new(["*", "a"]).unwrap_err(), HostError::AnyAndOne { other: "a".into() });
    }
}
