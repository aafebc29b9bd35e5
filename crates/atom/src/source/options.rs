//! What a search for a model depends on besides the name.

use super::error::SourceError;
use super::progress::Progress;
use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

/// Parameters of [`resolve`](super::resolve) and its siblings. Nothing below reads the environment.
#[derive(Clone, Debug)]
pub(crate) struct SourceOptions {
    /// Never touch the network.
    pub(crate) offline: bool,
    /// The cache; models lie under `models/` in it.
    pub(crate) home: PathBuf,
    /// How to show what goes on, on stderr.
    pub(crate) progress: Progress,
    /// Address of the hub, without a slash at the end (`HF_ENDPOINT`).
    pub(crate) hub_endpoint: String,
    /// Access token of the hub, for gated and private repositories (`HF_TOKEN`).
    pub(crate) hub_token: Option<Token>,
    /// The way out to the hub (`HTTPS_PROXY`, `ALL_PROXY` .., `NO_PROXY`).
    pub(crate) hub_proxy: Option<ureq::Proxy>,
    /// Ways to start Python, tried in order: program, then leading arguments.
    pub(crate) pythons: Vec<Vec<OsString>>,
}

/// A secret that does not print itself.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Token(String);

impl Token {
    pub(crate) fn new(secret: &str) -> Self {
        Self(secret.into())
    }

    pub(super) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// The hub's public address.
const HUB_ENDPOINT: &str = "https://huggingface.co";

impl SourceOptions {
    /// Options as the environment says; `var` looks a variable up.
    ///
    /// * cache: `ATOM_HOME`, else `$XDG_CACHE_HOME/atom`, else `~/.cache/atom`;
    /// * hub: `HF_ENDPOINT`, `HF_TOKEN`, else the token that a login left in `$HF_HOME/token`
    ///   (`~/.cache/huggingface/token`).
    pub(crate) fn from_env(
        offline: bool,
        progress: Progress,
        var: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, SourceError> {
        let folder = |name: &str| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let text = |name: &str| {
            let value = var(name)?.to_string_lossy().trim().to_owned();
            (!value.is_empty()).then_some(value)
        };
        let user_cache = || folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
        let home = cache_home(&var).ok_or(SourceError::NoHome)?;
        let hub_home = folder("HF_HOME").or_else(|| Some(user_cache()?.join("huggingface")));
        let left_by_login = || {
            let token = std::fs::read_to_string(hub_home?.join("token")).ok()?.trim().to_owned();
            (!token.is_empty()).then_some(token)
        };
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| HUB_ENDPOINT.into());
        Ok(Self {
            offline,
            home,
            progress,
            hub_endpoint: endpoint.trim_end_matches('/').into(),
            hub_token: text("HF_TOKEN").or_else(left_by_login).as_deref().map(Token::new),
            hub_proxy: ureq::Proxy::try_from_env(),
            pythons: vec![vec!["python3".into()], vec!["python".into()]],
        })
    }
}

/// Where atom keeps what it fetched or made: `ATOM_HOME`, else `$XDG_CACHE_HOME/atom`, else `~/.cache/atom`.
pub(crate) fn cache_home(var: &impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let folder = |name: &str| var(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user_cache = || folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
    folder("ATOM_HOME").or_else(|| Some(user_cache()?.join("atom")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(vars: &[(&str, &str)]) -> Result<SourceOptions, SourceError> {
        SourceOptions::from_env(false, Progress::Quiet, |name| {
            Some(vars.iter().find(|(key, _)| *key == name)?.1.into())
        })
    }

    #[test]
    fn the_cache_is_where_the_environment_says() {
        let home = |vars: &[(&str, &str)]| with(vars).unwrap().home;
        assert_eq!(
            home(&[("ATOM_HOME", "/a"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")]),
            PathBuf::from("/a")
        );
        assert_eq!(home(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")]), PathBuf::from("/x/atom"));
        assert_eq!(home(&[("ATOM_HOME", ""), ("HOME", "/h")]), PathBuf::from("/h/.cache/atom"));
        assert!(matches!(with(&[]), Err(SourceError::NoHome)));
    }

    #[test]
    fn the_hub_is_where_the_environment_says() {
        let plain = with(&[("HOME", "/nowhere")]).unwrap();
        assert_eq!((plain.hub_endpoint.as_str(), plain.hub_token), (HUB_ENDPOINT, None));
        let mirror =
            with(&[("HOME", "/h"), ("HF_ENDPOINT", "http://mirror/"), ("HF_TOKEN", " abc ")]).unwrap();
        assert!(!format!("{mirror:?}").contains("abc"));
        assert_eq!(
            (mirror.hub_endpoint.as_str(), mirror.hub_token.as_ref().map(Token::reveal)),
            ("http://mirror", Some("abc"))
        );
    }
}
