//! Which web pages may use the server from their visitors' browsers: none, unless the operator names them.

use axum::http::{HeaderName, HeaderValue, Method, Uri, header};
use std::time::Duration;
use thiserror::Error;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Origins whose pages may use the server. By default no page may: a browser sends no JSON to a server that
/// doesn't answer its preflight.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CorsOrigins {
    any: bool,
    origins: Vec<HeaderValue>,
}

/// The operator's fault, found at start.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum OriginError {
    /// Something that no browser would ever send, so that it would never act.
    #[error(
        "'{got}' is no origin; write it as a browser does, like https://example.com or http://localhost:3000, or *"
    )]
    NotAnOrigin {
        /// What was given.
        got: String,
    },
    /// One says everybody, another somebody.
    #[error("* allows every origin already; leave '{other}' out, or *")]
    AnyAndOne {
        /// The other one.
        other: String,
    },
}

impl CorsOrigins {
    /// Takes origins as browsers write them, or `*` alone for every page there is.
    pub fn new<O: AsRef<str>>(origins: impl IntoIterator<Item = O>) -> Result<Self, OriginError> {
        let mut allowed = Self::default();
        for origin in origins {
            match origin.as_ref() {
                "*" => allowed.any = true,
                origin => allowed.origins.push(parse(origin)?),
            }
        }
        match allowed.origins.first() {
            Some(other) if allowed.any => {
                Err(OriginError::AnyAndOne { other: String::from_utf8_lossy(other.as_bytes()).into_owned() })
            }
            _ => Ok(allowed),
        }
    }

    /// True where every page may use the server.
    pub(crate) fn is_any(&self) -> bool {
        self.any
    }

    /// True for the origin of a page that may.
    pub(crate) fn admit(&self, origin: &HeaderValue) -> bool {
        self.any || self.origins.contains(origin)
    }

    /// Answers preflights, and tells browsers on every response who may read it. Without origins it does neither.
    pub(crate) fn layer(&self) -> Option<CorsLayer> {
        if !self.any && self.origins.is_empty() {
            return None;
        }
        let origins = if self.any { AllowOrigin::any() } else { AllowOrigin::list(self.origins.clone()) };
        Some(
            CorsLayer::new()
                .allow_origin(origins)
                .allow_methods([Method::GET, Method::POST])
                // A wildcard would not cover `authorization`.
                .allow_headers(AllowHeaders::mirror_request())
                .expose_headers([HeaderName::from_static("x-request-id"), header::RETRY_AFTER])
                .max_age(PREFLIGHT_AGE),
        )
    }
}

/// Scheme, host and port, and nothing else.
fn parse(origin: &str) -> Result<HeaderValue, OriginError> {
    let wrong = || OriginError::NotAnOrigin { got: origin.to_owned() };
    let uri: Uri = origin.parse().map_err(|_| wrong())?;
    let (scheme, authority) = (uri.scheme_str().ok_or_else(wrong)?, uri.authority().ok_or_else(wrong)?);
    // What else it has (a path, a slash at the end, a user) no browser would send.
    let plain = format!("{scheme}://{authority}").to_ascii_lowercase();
    if plain != origin || authority.as_str().contains('@') {
        return Err(wrong());
    }
    HeaderValue::from_str(origin).map_err(|_| wrong())
}

/// How long a browser may remember a preflight's answer; Chromium takes two hours at most.
const PREFLIGHT_AGE: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_taken_as_browsers_send_them_and_no_other_way() {
        for fine in
            ["http://localhost:3000", "https://a.example", "http://[::1]:80", "chrome-extension://abcdef"]
        {
            assert!(CorsOrigins::new([fine]).unwrap().layer().is_some(), "{fine}");
        }
        for wrong in [
            "",
            "example.com",
            "https://a.example/",
            "https://a.example/x",
            "https://",
            "HTTPS://A",
            "https://u@a",
            "null",
        ] {
            assert_eq!(
                CorsOrigins::new([wrong]).unwrap_err(),
                OriginError::NotAnOrigin { got: wrong.into() }
            );
        }
        assert!(CorsOrigins::new(["*"]).unwrap().layer().is_some());
        let both = CorsOrigins::new(["*", "https://a.example"]).unwrap_err();
        assert_eq!(both, OriginError::AnyAndOne { other: "https://a.example".into() });
        assert!(CorsOrigins::new(Vec::<String>::new()).unwrap().layer().is_none());
    }
}
