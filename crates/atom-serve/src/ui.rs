//! The page at `/`, for people: its parts are in the binary, and it asks nobody but this server.
//!
//! The page itself needs no key, so that it can ask for one; what it then calls does. `--no-ui` takes all of
//! it away, the stream of steps too.

mod steps;

use crate::openapi::{Operation, Routes, operations};
use atom_base::hash::{FNV_64, fnv1a_64};
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;

pub(crate) use steps::VIEWERS_MAX;

/// The page and the stream that it draws.
pub(crate) fn routes() -> Routes {
    let routes = Routes::new().get("/debug/steps", steps::stream, &operations::STEPS);
    ASSETS.iter().fold(routes, |routes, asset| {
        let tag = asset.tag();
        let respond = move |headers: HeaderMap| std::future::ready(asset.respond(&headers, &tag));
        routes.get(asset.path, respond, &asset.operation)
    })
}

/// Part of the page itself, which says nothing that isn't public.
pub(crate) fn is_asset(path: &str) -> bool {
    ASSETS.iter().any(|asset| asset.path == path)
}

/// One file of the page.
struct Asset {
    path: &'static str,
    kind: &'static str,
    text: &'static str,
    operation: Operation,
}

impl Asset {
    /// Changes with the content: a browser that has this one is not sent it again.
    fn tag(&self) -> HeaderValue {
        let hash = fnv1a_64(FNV_64, self.text.bytes());
        HeaderValue::try_from(format!("\"{hash:016x}\"")).expect("quotes and hexadecimal digits")
    }

    fn respond(&self, request: &HeaderMap, tag: &HeaderValue) -> Response {
        let mut response = Response::new(Body::empty());
        let headers = response.headers_mut();
        headers.insert(header::ETAG, tag.clone());
        for &(name, value) in HEADERS {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        if has_it(request, tag) {
            *response.status_mut() = StatusCode::NOT_MODIFIED;
        } else {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(self.kind));
            *response.body_mut() = Body::from(self.text);
        }
        response
    }
}

/// True if the client names the tag among those that it has (RFC 9110, 13.1.2: by weak comparison).
fn has_it(request: &HeaderMap, tag: &HeaderValue) -> bool {
    let tag = tag.as_bytes();
    request.get_all(header::IF_NONE_MATCH).iter().any(|value| {
        value.as_bytes().split(|&byte| byte == b',').any(|one| {
            let one = one.trim_ascii();
            one == b"*" || one.strip_prefix(b"W/").unwrap_or(one) == tag
        })
    })
}

/// What goes with every file. The policy forbids all that the page does not need, other hosts and inline
/// scripts first of all: what a model says stays text even if the page had a hole. A new binary has a new
/// page, so a browser asks each time, and gets a 304.
#[rustfmt::skip]
const HEADERS: &[(&str, &str)] = &[
    ("cache-control", "no-cache"),
    ("content-security-policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
        connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
];

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

macro_rules! asset {
    ($path:literal, $kind:ident, $file:literal, $id:literal) => {
        Asset {
            path: $path,
            kind: $kind,
            text: include_str!(concat!("../assets/", $file)),
            operation: operations::asset($id, $kind),
        }
    };
}

static ASSETS: &[Asset] = &[
    asset!("/", HTML, "index.html", "page"),
    asset!("/ui/atom.css", CSS, "atom.css", "pageStyle"),
    asset!("/ui/favicon.svg", SVG, "favicon.svg", "pageFavicon"),
    asset!("/ui/theme.js", SCRIPT, "theme.js", "pageTheme"),
    asset!("/ui/atom.js", SCRIPT, "atom.js", "pageAtom"),
    asset!("/ui/chat.js", SCRIPT, "chat.js", "pageChat"),
    asset!("/ui/message.js", SCRIPT, "message.js", "pageMessage"),
    asset!("/ui/markdown.js", SCRIPT, "markdown.js", "pageMarkdown"),
    asset!("/ui/server.js", SCRIPT, "server.js", "pageServer"),
    asset!("/ui/group.js", SCRIPT, "group.js", "pageGroup"),
    asset!("/ui/lanes.js", SCRIPT, "lanes.js", "pageLanes"),
];
