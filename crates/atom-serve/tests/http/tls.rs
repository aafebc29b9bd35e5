//! The same server over TLS.

use crate::client::{Client, JSON};
use crate::fake::{Play, Site, answer, bytes, says};
use atom_serve::Tls;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// A fresh certificate for localhost, and its files, which go with it.
struct Identity {
    folder: PathBuf,
    certificate: CertificateDer<'static>,
}

impl Identity {
    fn new(name: &str) -> Self {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let folder = std::env::temp_dir().join(format!("atom-tls-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("cert.pem"), made.cert.pem()).unwrap();
        std::fs::write(folder.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
        Self { folder, certificate: made.cert.der().clone() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn load(&self) -> Tls {
        Tls::load(&self.path("cert.pem"), &self.path("key.pem")).unwrap()
    }

    async fn connect(&self, site: &Site) -> Client {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate.clone()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(site.address).await.unwrap();
        let connector = TlsConnector::from(Arc::new(config));
        Client::over(connector.connect("localhost".try_into().unwrap(), stream).await.unwrap())
    }
}

impl Drop for Identity {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[tokio::test]
async fn answers_and_streams_go_over_tls_and_refusals_too() {
    let identity = Identity::new("serve");
    let tls = identity.load();
    let site = Site::start_with(says("ok"), |options| options.tls = Some(tls)).await;
    let mut client = identity.connect(&site).await;
    for _ in 0..3 {
        assert_eq!(client.get("/health").await.status, 200);
        let body = json!({"prompt": "x", "stream": true});
        assert!(!client.post("/v1/completions", &body).await.chunks().is_empty());
        let whole = client.post("/v1/completions", &json!({"prompt": "x"})).await;
        assert_eq!(whole.json()["choices"][0]["text"], "ok");
    }
    client.write(b"NONSENSE\r\n\r\n").await;
    let refused = client.response().await;
    assert_eq!((refused.status, &refused.error()["code"]), (400, &json!("invalid_http")));
    assert!(client.is_closed().await);

    // Who speaks plainly is shut out, and nobody else.
    let mut plain = site.client().await;
    plain.send("GET", "/health", &[], b"").await;
    while !plain.is_closed().await {}
    assert_eq!(identity.connect(&site).await.get("/health").await.status, 200);
}

#[tokio::test]
async fn a_client_that_leaves_over_tls_aborts_its_request() {
    let identity = Identity::new("leave");
    let tls = identity.load();
    let script = |request: &atom_engine::Request| {
        let mut plays = answer(request, &bytes("ab"));
        plays.insert(2, Play::Gate);
        plays
    };
    let site = Site::start_with(script, |options| options.tls = Some(tls)).await;
    for (count, stream) in [false, true].into_iter().enumerate() {
        let mut client = identity.connect(&site).await;
        let body = json!({"prompt": "x", "stream": stream}).to_string();
        client.send("POST", "/v1/completions", &[JSON], body.as_bytes()).await;
        while site.fake.taken_now() <= count {
            tokio::task::yield_now().await;
        }
        drop(client);
        site.fake.aborted(count + 1).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_handshake_that_never_ends_is_dropped() {
    let identity = Identity::new("slow");
    let tls = identity.load();
    let site = Site::start_with(says("ok"), |options| options.tls = Some(tls)).await;
    let mut client = site.client().await;
    client.write(b"\x16\x03\x01").await;
    assert_eq!(client.rest().await, "");
}

#[test]
fn files_that_can_not_be_used_are_refused_in_one_line() {
    let (one, two) = (Identity::new("one"), Identity::new("two"));
    let (cert, key) = (one.path("cert.pem"), one.path("key.pem"));
    let empty = one.path("empty.pem");
    std::fs::write(&empty, "").unwrap();
    let torn = one.path("torn.pem");
    std::fs::write(&torn, "-----BEGIN CERTIFICATE-----\nabc!\n-----END CERTIFICATE-----\n").unwrap();
    let other = two.path("key.pem");
    let absent = Path::new("/no/such/file.pem");
    let cases = [
        (absent, key.as_path(), vec!["certificate /no/such/file.pem", "No such file"]),
        (&cert, absent, vec!["private key /no/such/file.pem", "No such file"]),
        (&key, &key, vec!["certificate", "key.pem", "holds no PEM certificate"]),
        (&empty, &key, vec!["certificate", "empty.pem", "holds no PEM certificate"]),
        (&cert, &cert, vec!["private key", "cert.pem", "holds no PEM private key"]),
        (&torn, &key, vec!["certificate", "torn.pem", "not valid PEM"]),
        (&cert, &other, vec!["cert.pem", "key.pem", "can't be used"]),
    ];
    for (certificate, key, words) in cases {
        let error = Tls::load(certificate, key).unwrap_err().to_string();
        assert!(!error.contains('\n') && !error.contains("PRIVATE"), "{error}");
        for word in words {
            assert!(error.contains(word), "no {word:?} in {error}");
        }
    }
}
