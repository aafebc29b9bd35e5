//! A client of the Hugging Face hub: what a repository holds, and the bytes of a file.

use super::cache::Delivery;
use super::options::{SourceOptions, Token};
use serde::Deserialize;
use std::io::Read;
use std::time::Duration;
use ureq::http::StatusCode;
use ureq::{Agent, Body};

/// The hub at one address.
pub(super) struct Hub {
    agent: Agent,
    endpoint: String,
    token: Option<Token>,
}

/// A repository at one commit.
#[derive(Debug)]
pub(super) struct Listing {
    /// So that all files come from one state of the repository.
    pub(super) commit: String,
    pub(super) files: Vec<HubFile>,
}

/// A file as the hub describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HubFile {
    /// Path in the repository.
    pub(super) name: String,
    pub(super) size_bytes: Option<u64>,
    /// Known for large files only; small ones lie in git.
    pub(super) sha256: Option<String>,
}

/// Where to find files.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub(super) repo: &'a str,
    pub(super) commit: &'a str,
}

/// Long enough for a slow line, short enough that the next source is tried while the user still watches.
const CONNECT_MAX: Duration = Duration::from_secs(4);
/// From the request to the first byte of the answer.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// A download that is silent for this long has broken off.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// The largest listings have some ten thousand files.
const LISTING_BYTES_MAX: u64 = 16 << 20;

impl Hub {
    pub(super) fn new(options: &SourceOptions) -> Self {
        let config = Agent::config_builder()
            .timeout_resolve(Some(CONNECT_MAX))
            .timeout_connect(Some(CONNECT_MAX))
            .timeout_recv_response(Some(ANSWER_MAX))
            .timeout_per_read(Some(SILENCE_MAX))
            .proxy(options.hub_proxy.clone())
            .http_status_as_error(false)
            // A renamed repository redirects within the hub; the hosts of large files get no token.
            .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
            .user_agent(concat!("atom/", env!("CARGO_PKG_VERSION")))
            .build();
        Self {
            agent: config.into(),
            endpoint: options.hub_endpoint.clone(),
            token: options.hub_token.clone(),
        }
    }

    /// What a repository holds. The error is one line.
    pub(super) fn list(&self, repo: &str, revision: &str) -> Result<Listing, String> {
        let url = format!("{}/api/models/{repo}/revision/{}?blobs=true", self.endpoint, escape(revision));
        let (status, mut body) = self.get(&url, 0)?;
        self.expect_success(status, repo)?;
        let text = body
            .with_config()
            .limit(LISTING_BYTES_MAX)
            .read_to_string()
            .map_err(|error| format!("the list of files broke off: {error}"))?;
        let raw: RawListing = serde_json::from_str(&text)
            .map_err(|error| format!("the answer is no list of files of a hub: {error}"))?;
        Ok(Listing {
            commit: raw.sha.unwrap_or_else(|| revision.into()),
            files: raw.siblings.into_iter().map(RawFile::into_file).collect(),
        })
    }

    /// The bytes of a file, from `from_byte` on if the hub agrees. The error is one line.
    pub(super) fn open(
        &self,
        place: &Place,
        file: &str,
        from_byte: u64,
    ) -> Result<Delivery<impl Read + use<>>, String> {
        let url =
            format!("{}/{}/resolve/{}/{}", self.endpoint, place.repo, escape(place.commit), escape(file));
        let (mut status, mut body) = self.get(&url, from_byte)?;
        if status == StatusCode::RANGE_NOT_SATISFIABLE {
            (status, body) = self.get(&url, 0)?;
        }
        self.expect_success(status, place.repo)?;
        // A server that ignores the range answers 200 and sends the whole file.
        let from_byte = if status == StatusCode::PARTIAL_CONTENT { from_byte } else { 0 };
        Ok(Delivery { reader: body.into_reader(), from_byte })
    }

    fn get(&self, url: &str, from_byte: u64) -> Result<(StatusCode, Body), String> {
        let mut request = self.agent.get(url);
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {}", token.reveal()));
        }
        if from_byte > 0 {
            request = request.header("Range", format!("bytes={from_byte}-"));
        }
        let response = request.call().map_err(|error| match error {
            ureq::Error::Timeout(what) => format!("no answer in time ({what})"),
            error => format!("can't be reached: {error}"),
        })?;
        let (parts, body) = response.into_parts();
        Ok((parts.status, body))
    }

    fn expect_success(&self, status: StatusCode, repo: &str) -> Result<(), String> {
        match status.as_u16() {
            200 | 206 => Ok(()),
            401 | 403 if self.token.is_none() => Err(format!(
                "refused ({status}): the repository does not exist, is private, or is gated; for a gated one accept \
                 its terms at {}/{repo} and set HF_TOKEN",
                self.endpoint
            )),
            401 | 403 => Err(format!(
                "refused ({status}) with your token; check HF_TOKEN, and accept the terms at {}/{repo}",
                self.endpoint
            )),
            404 => Err(format!("no such repository, revision or file ({status})")),
            429 => Err(format!("too many requests ({status}); wait a while or set HF_TOKEN")),
            _ => Err(format!("answered {status}")),
        }
    }
}

#[derive(Deserialize)]
struct RawListing {
    sha: Option<String>,
    siblings: Vec<RawFile>,
}

#[derive(Deserialize)]
struct RawFile {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<RawLfs>,
}

#[derive(Deserialize)]
struct RawLfs {
    #[serde(alias = "oid")]
    sha256: Option<String>,
    size: Option<u64>,
}

impl RawFile {
    fn into_file(self) -> HubFile {
        let (sha256, lfs_size) = self.lfs.map_or((None, None), |lfs| (lfs.sha256, lfs.size));
        HubFile { name: self.rfilename, size_bytes: lfs_size.or(self.size), sha256 }
    }
}

/// Percent-encodes what a path segment of a URL can't hold. Slashes stay.
fn escape(path: &str) -> String {
    let mut escaped = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}
