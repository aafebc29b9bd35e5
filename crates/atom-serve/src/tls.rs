//! HTTPS, for those who put no proxy in front.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};
use tokio_rustls::server::TlsStream;

/// A certificate and its key, ready to serve TLS 1.2 and 1.3.
#[derive(Clone)]
pub struct Tls {
    acceptor: TlsAcceptor,
}

/// Why the server can't speak TLS: the operator's fault, found at start.
#[derive(Debug, Error)]
pub enum TlsError {
    /// A file can't be read, or is no PEM.
    #[error("{what} {}: {reason}", path.display())]
    Unreadable {
        /// Which of the two files.
        what: &'static str,
        /// Where it is.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The files are fine and don't go together, or the key is of a kind that is not known.
    #[error("certificate {} and key {} can't be used: {source}", certificate.display(), key.display())]
    Unfit {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// In rustls' words.
        source: rustls::Error,
    },
}

impl Tls {
    /// Reads a chain of certificates, the server's own first, and the private key of the first: both PEM.
    pub fn load(certificate: &Path, key: &Path) -> Result<Self, TlsError> {
        let unreadable = |what, path: &Path, reason| TlsError::Unreadable { what, path: path.into(), reason };
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(certificate)
            .and_then(Iterator::collect)
            .map_err(|error| unreadable("certificate", certificate, reason(error)))?;
        if chain.is_empty() {
            return Err(unreadable("certificate", certificate, "it holds no PEM certificate".into()));
        }
        let private = PrivateKeyDer::from_pem_file(key)
            .map_err(|error| unreadable("private key", key, reason(error)))?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, private))
            .map_err(|source| TlsError::Unfit { certificate: certificate.into(), key: key.into(), source })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { acceptor: TlsAcceptor::from(Arc::new(config)) })
    }

    /// Shakes hands. A peer that doesn't come to an end in time is dropped.
    pub(crate) async fn accept<S>(&self, stream: S) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        tokio::time::timeout(HANDSHAKE, self.acceptor.accept(stream)).await.unwrap_or_else(|_| {
            Err(io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake takes too long"))
        })
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

/// In few words, without the parser's own.
fn reason(error: pem::Error) -> String {
    match error {
        pem::Error::Io(error) => error.to_string(),
        pem::Error::NoItemsFound => "it holds no PEM private key".into(),
        error => format!("it is not valid PEM ({error})"),
    }
}

/// Longest TLS handshake: two round trips, on a line that loses packets.
const HANDSHAKE: Duration = Duration::from_secs(15);
