//! Who may use the server, for how long, and what is written down: flags to options, checked at start.

use anyhow::{Context, Result, bail};
use atom_serve::{AllowedHosts, ApiKeys, CorsOrigins, LogSink, ServerOptions, Tls};
use clap::Args;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::convert::Infallible;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

#[derive(Args, Clone, Debug)]
pub(crate) struct AccessArgs {
    /// A key that requests must bring, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'; may be given several
    /// times. Only /health and what is below it stays open. A command line can be read by other users of the
    /// machine: --api-key-file and the variable can't.
    #[arg(long, env = "ATOM_API_KEY", hide_env_values = true, value_name = "KEY")]
    api_key: Vec<Secret>,

    /// A file with more keys, one a line; empty lines and those that begin with # are no keys.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,

    /// A name by which the server may be asked (its Host), beside localhost and addresses; may be given several times.
    /// Only asked for where it listens on a loopback address without keys and TLS: there a web page could give itself
    /// this machine's address. * is every name [default: none].
    #[arg(long, value_name = "NAME")]
    allowed_host: Vec<String>,

    /// A web page's origin, like https://example.com, whose scripts may use the server; may be given several
    /// times. * is every page there is [default: none].
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,

    /// Speak HTTPS: a PEM file with the server's certificate and those that vouch for it.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_cert: Option<PathBuf>,

    /// The certificate's private key, PEM without a password.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,

    /// Seconds that a generation may take from its request's head until its answer was read; then it gets a 504, or
    /// its stream an error, and what has not left 5 s later is cut [default: as long as it takes].
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    request_timeout: Option<u64>,

    /// Seconds that a client may keep the server waiting: for a request, for the rest of one, or for room to
    /// send more of an answer, whose request is aborted then. Waiting for the model doesn't count.
    #[arg(long, value_name = "SECONDS", default_value_t = 75, value_parser = clap::value_parser!(u64).range(1..))]
    idle_timeout: u64,

    /// Write a line of JSON to this file, or to standard output if it is -, for every request: time, id, status,
    /// tokens, finish reasons, durations; no prompts and no answers. SIGHUP opens the file anew.
    #[arg(long, value_name = "FILE")]
    request_log: Option<PathBuf>,

    /// Write requests and answers too, but for secrets: keys of this server, words behind Bearer, values of fields named
    /// like a password, secret, token, API key or Authorization, keys that begin like those of OpenAI (sk-), AWS, Hugging
    /// Face, GitHub, GitLab, Google, Slack or Stripe, JSON Web Tokens, logins in URLs and PEM blocks. Nothing else is
    /// recognised.
    #[arg(long, requires = "request_log")]
    request_log_content: bool,
}

/// A string that is never shown.
#[derive(Clone)]
struct Secret(String);

impl AccessArgs {
    /// Reads every file, so that a wrong one is found before the model is loaded.
    pub(crate) fn apply(&self, options: &mut ServerOptions) -> Result<()> {
        options.api_keys = Arc::new(self.keys()?);
        options.hosts = AllowedHosts::new(&self.allowed_host).context("--allowed-host")?;
        options.cors = CorsOrigins::new(&self.cors_origin).context("--cors-origin")?;
        options.tls = match (&self.tls_cert, &self.tls_key) {
            (Some(certificate), Some(key)) => {
                Some(Tls::load(certificate, key).context("--tls-cert, --tls-key")?)
            }
            _ => None,
        };
        options.request_timeout = self.request_timeout.map(Duration::from_secs);
        options.idle_timeout = Duration::from_secs(self.idle_timeout);
        options.request_log = match &self.request_log {
            None => None,
            Some(path) => Some(sink(path)?.with_content(self.request_log_content)),
        };
        Ok(())
    }

    /// The scheme of the server's address.
    pub(crate) fn scheme(&self) -> &'static str {
        if self.tls_cert.is_some() { "https" } else { "http" }
    }

    /// True when SIGHUP has a meaning.
    pub(crate) fn has_log_file(&self) -> bool {
        self.request_log.as_deref().is_some_and(|path| path != Path::new(STDOUT))
    }

    fn keys(&self) -> Result<ApiKeys> {
        let mut keys: Vec<String> = self.api_key.iter().map(|key| key.0.clone()).collect();
        if let Some(path) = &self.api_key_file {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("--api-key-file {}", path.display()))?;
            let before = keys.len();
            keys.extend(ApiKeys::lines(&text).map(str::to_owned));
            if keys.len() == before {
                bail!("--api-key-file {} holds no key; leave it out to serve everybody", path.display());
            }
        }
        ApiKeys::new(keys).context("--api-key, --api-key-file")
    }
}

fn sink(path: &Path) -> Result<LogSink> {
    if path == Path::new(STDOUT) {
        return Ok(LogSink::stdout());
    }
    LogSink::file(path).with_context(|| format!("--request-log {}", path.display()))
}

/// Takes as many descriptors as the system allows: many shells give a program 1024, and every connection is one.
pub(crate) fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::warn!("at most {} connections: {error}", limit.current.unwrap_or_default());
    }
}

impl FromStr for Secret {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[redacted]")
    }
}

/// The file name of standard output.
const STDOUT: &str = "-";

#[cfg(test)]
mod tests {
    use super::*;
    use atom_serve::SeedSource;
    use clap::{CommandFactory, Parser};

    #[derive(Debug, Parser)]
    struct Flags {
        #[command(flatten)]
        access: AccessArgs,
    }

    fn apply(flags: &[&str]) -> Result<ServerOptions> {
        let flags = Flags::try_parse_from([&["serve"], flags].concat())?;
        let mut options = ServerOptions::new("tiny", SeedSource::new(1));
        flags.access.apply(&mut options).map(|()| options)
    }

    fn file(name: &str, text: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("atom-access-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn without_flags_everybody_is_served_plainly() {
        let options = apply(&[]).unwrap();
        assert!(options.api_keys.is_empty() && options.tls.is_none() && options.request_log.is_none());
        assert_eq!((options.request_timeout, options.idle_timeout), (None, Duration::from_secs(75)));
        assert_eq!(options.cors, CorsOrigins::default());
    }

    #[test]
    fn keys_of_flags_and_file_are_taken_together_and_never_shown() {
        let path = file("keys", "# ours\nsk-three\n\n");
        let flags = ["--api-key", "sk-one", "--api-key=sk-two", "--api-key-file", path.to_str().unwrap()];
        let parsed = Flags::try_parse_from([&["serve"], &flags[..]].concat()).unwrap();
        assert!(!format!("{parsed:?}").contains("sk-"), "{parsed:?}");
        let options = apply(&flags).unwrap();
        assert_eq!(format!("{:?}", options.api_keys), "ApiKeys(3 keys)");
        let help = Flags::command().render_long_help().to_string();
        assert!(help.contains("ATOM_API_KEY") && !help.contains("ATOM_API_KEY="), "{help}");
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn what_can_not_be_used_is_refused_with_its_flag() {
        let empty = file("empty", "# none\n");
        let empty = empty.to_str().unwrap();
        let cases: [(&[&str], &[&str]); 13] = [
            (&["--api-key", ""], &["--api-key", "key 1 is empty"]),
            (&["--api-key", "good", "--api-key", "two words"], &["key 2", "byte 3"]),
            (&["--api-key-file", "/no/such/file"], &["--api-key-file /no/such/file", "No such file"]),
            (&["--api-key-file", empty], &["--api-key-file", "holds no key"]),
            (&["--allowed-host", "a:80"], &["--allowed-host", "'a:80' is no host name"]),
            (&["--cors-origin", "example.com"], &["--cors-origin", "'example.com' is no origin"]),
            (&["--cors-origin", "*", "--cors-origin", "https://a.example"], &["https://a.example"]),
            (&["--tls-cert", "/a"], &["--tls-key"]),
            (
                &["--tls-cert", "/no/such/cert", "--tls-key", "/b"],
                &["--tls-cert", "certificate /no/such/cert"],
            ),
            (&["--request-timeout", "0"], &["--request-timeout"]),
            (&["--idle-timeout", "soon"], &["--idle-timeout"]),
            (&["--request-log-content"], &["--request-log"]),
            (
                &["--request-log", "/no/such/folder/log"],
                &["--request-log /no/such/folder/log", "No such file"],
            ),
        ];
        for (flags, words) in cases {
            let error = format!("{:#}", apply(flags).unwrap_err());
            for word in words {
                assert!(error.contains(word), "{flags:?}: no {word:?} in {error}");
            }
            assert!(!error.contains("two words") && !error.contains("good"), "{error}");
        }
        std::fs::remove_file(empty).unwrap();
    }
}
