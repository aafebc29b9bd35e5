//! The address of a server.

use crate::error::BenchError;
use hyper::Uri;
use std::fmt;

/// A parsed `--url`: plain HTTP only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    host: String,
    port: u16,
    /// What precedes `/v1/..`; no slash at its end.
    prefix: String,
}

impl Target {
    /// Parses `http://host[:port][/path]`; the scheme may be left out, and a `/v1` at the end is
    /// understood.
    pub fn parse(url: &str) -> Result<Self, BenchError> {
        let refuse = |why: &str| Err(BenchError::Url { url: url.into(), why: why.into() });
        let with_scheme = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        let Ok(uri) = with_scheme.parse::<Uri>() else {
            return refuse("it is no URL; write http://host:port");
        };
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return refuse(
                    "https is not spoken here; use the server's plain http address, or put a TLS tunnel (stunnel, \
                     ssh -L) in between",
                );
            }
            _ => return refuse("only http:// is spoken here"),
        }
        if uri.query().is_some() {
            return refuse("it has a query (?..); leave it out");
        }
        let Some(host) = uri.host().filter(|host| !host.is_empty()) else {
            return refuse("it names no host; write http://host:port");
        };
        let authority = uri.authority().map_or("", |authority| authority.as_str());
        if authority.contains('@') {
            return refuse("it names a user; leave it out (a key goes into --api-key)");
        }
        // An IPv6 address has colons of its own, within brackets.
        let has_port = authority.rsplit(']').next().is_some_and(|rest| rest.contains(':'));
        if has_port && uri.port_u16().is_none_or(|port| port == 0) {
            return refuse("the port must be a number from 1 to 65535");
        }
        let path = uri.path().trim_end_matches('/');
        Ok(Self {
            host: host.into(),
            port: uri.port_u16().unwrap_or(80),
            prefix: path.strip_suffix("/v1").unwrap_or(path).into(),
        })
    }

    /// The value of the `Host` header.
    pub(crate) fn authority(&self) -> String {
        format!("{}:{}", self.host, self.port)
    }

    /// What to connect to; an IPv6 address without its brackets.
    pub(crate) fn socket(&self) -> (&str, u16) {
        (self.host.trim_start_matches('[').trim_end_matches(']'), self.port)
    }

    /// The request target of an endpoint such as `/v1/models`.
    pub(crate) fn path(&self, endpoint: &str) -> String {
        format!("{}{endpoint}", self.prefix)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}:{}{}", self.host, self.port, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_understood_in_their_usual_spellings() {
        for (url, shown, path) in [
            ("http://127.0.0.1:8000", "http://127.0.0.1:8000", "/v1/models"),
            ("http://127.0.0.1:8000/", "http://127.0.0.1:8000", "/v1/models"),
            ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000", "/v1/models"),
            ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000", "/v1/models"),
            ("localhost:9", "http://localhost:9", "/v1/models"),
            ("http://gateway/team/v1", "http://gateway:80/team", "/team/v1/models"),
        ] {
            let target = Target::parse(url).unwrap();
            assert_eq!((target.to_string().as_str(), target.path("/v1/models").as_str()), (shown, path));
        }
        assert_eq!(Target::parse("http://[::1]:80").unwrap().socket(), ("::1", 80));
    }

    #[test]
    fn what_can_t_be_reached_is_refused_with_the_way_out() {
        for (url, part) in [
            ("https://api.example.com/v1", "plain http address"),
            ("ftp://host", "only http://"),
            ("", "no URL"),
            ("http://", "no URL"),
            ("http://host:99999", "from 1 to 65535"),
            ("http://host:", "from 1 to 65535"),
            ("http://me:secret@host", "names a user"),
            ("http://host:0", "from 1 to 65535"),
            ("http://host/?x=1", "query"),
            ("http://ho st", "no URL"),
        ] {
            let message = Target::parse(url).unwrap_err().to_string();
            assert!(message.contains(part), "{url:?}: {message}");
        }
    }
}
