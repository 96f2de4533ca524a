//! Opens the object store that a URL names.

use crate::bucket::{Bucket, runtime};
use crate::directory::Directory;
use crate::fault::one_line;
use crate::options::Options;
use kvferry_store::{Error, Result};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{BackoffConfig, ClientConfigKey, ObjectStore, ObjectStoreScheme, RetryConfig};
use std::future::Future;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;
use url::Url;

/// A connection that is not there by then is a failure.
const CONNECT_TIMEOUT: &str = "2s";
/// Time limit of a service that gives credentials to a machine, used if none are set. The service is in the same data
/// centre, or does not exist.
const CREDENTIALS_TIMEOUT: Duration = Duration::from_secs(2);

/// The object store of a URL.
pub(crate) fn connect(url: &str, options: &Options) -> Result<Bucket> {
    let forms =
        "use s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or file:///directory";
    // The text of a URL that can't be parsed may have a password.
    let parsed = Url::parse(url).map_err(|e| {
        Error::InvalidArgument(format!(
            "the URL of the object store can't be parsed ({e}): {forms}"
        ))
    })?;
    let location = location(&parsed);
    let unknown = || Error::InvalidArgument(format!("{location} is no object store: {forms}"));
    let (scheme, prefix) = ObjectStoreScheme::parse(&parsed).map_err(|_| unknown())?;
    let _ = rustls::crypto::ring::default_provider().install_default();
    let open = Open { url: parsed.as_str(), location: &location, options };
    let store = match scheme {
        ObjectStoreScheme::Local => return open.directory(&parsed),
        ObjectStoreScheme::AmazonS3 => open.s3()?,
        ObjectStoreScheme::GoogleCloudStorage => open.gcs()?,
        ObjectStoreScheme::MicrosoftAzure => open.azure()?,
        _ => return Err(unknown()),
    };
    Bucket::new(store, prefix, &location, options.request_timeout)
}

/// The URL without a password and without a query, which may hold a signature.
fn location(url: &Url) -> String {
    let mut shown = url.clone();
    let _ = shown.set_password(None);
    shown.set_query(None);
    shown.set_fragment(None);
    shown.to_string()
}

struct Open<'a> {
    url: &'a str,
    location: &'a str,
    options: &'a Options,
}

impl Open<'_> {
    fn failed(&self, what: String) -> Error {
        Error::Objects { location: self.location.to_owned(), what }
    }

    fn not_built(&self, error: &object_store::Error) -> Error {
        self.failed(one_line(&error.to_string()))
    }

    fn retry(&self) -> RetryConfig {
        let backoff = BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(1),
            base: 2.0,
        };
        RetryConfig {
            backoff,
            max_retries: self.options.retries,
            retry_timeout: self.options.request_timeout,
        }
    }

    /// The given options, behind defaults for those of the HTTP client.
    fn keys<K: FromStr>(&self, client: impl Fn(ClientConfigKey) -> K) -> Result<Vec<(K, String)>> {
        let timeout = format!("{}ms", self.options.request_timeout.as_millis().max(1));
        let mut keys = vec![
            (client(ClientConfigKey::ConnectTimeout), CONNECT_TIMEOUT.to_owned()),
            (client(ClientConfigKey::Timeout), timeout),
        ];
        for (key, value) in &self.options.others.0 {
            let parsed = key.parse().map_err(|_| {
                Error::InvalidArgument(format!(
                    "{key} is no option of the object store {}, and none of the tier's: {}",
                    self.location,
                    crate::OPTIONS.join(", ")
                ))
            })?;
            keys.push((parsed, value.clone()));
        }
        Ok(keys)
    }

    fn s3(&self) -> Result<Arc<dyn ObjectStore>> {
        use AmazonS3ConfigKey as Key;
        let keys = self.keys(Key::Client)?;
        let builder = AmazonS3Builder::from_env().with_url(self.url).with_retry(self.retry());
        let builder = keys.into_iter().fold(builder, |it, (key, value)| it.with_config(key, value));
        let sources = [
            Key::AccessKeyId,
            Key::SecretAccessKey,
            Key::WebIdentityTokenFile,
            Key::ContainerCredentialsRelativeUri,
            Key::ContainerCredentialsFullUri,
        ];
        let is_given = sources.iter().any(|key| builder.get_config_value(key).is_some())
            || is_set(builder.get_config_value(&Key::SkipSignature));
        let store = builder.build().map_err(|e| self.not_built(&e))?;
        if !is_given {
            let help = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the options of these names), or \
                        the option skip_signature=true for a bucket that is public";
            self.ask(store.credentials().get_credential(), help)?;
        }
        Ok(Arc::new(store))
    }

    fn gcs(&self) -> Result<Arc<dyn ObjectStore>> {
        use GoogleConfigKey as Key;
        let keys = self.keys(Key::Client)?;
        let builder = GoogleCloudStorageBuilder::from_env();
        let builder = builder.with_url(self.url).with_retry(self.retry());
        let builder = keys.into_iter().fold(builder, |it, (key, value)| it.with_config(key, value));
        let sources = [
            Key::ServiceAccount,
            Key::ServiceAccountKey,
            Key::ApplicationCredentials,
            Key::BearerToken,
        ];
        let is_given = sources.iter().any(|key| builder.get_config_value(key).is_some())
            || is_set(builder.get_config_value(&Key::SkipSignature));
        let store = builder.build().map_err(|e| self.not_built(&e))?;
        if !is_given {
            let help = "set GOOGLE_APPLICATION_CREDENTIALS to a file with credentials, or the option \
                        skip_signature=true for a bucket that is public";
            self.ask(store.credentials().get_credential(), help)?;
        }
        Ok(Arc::new(store))
    }

    fn azure(&self) -> Result<Arc<dyn ObjectStore>> {
        use AzureConfigKey as Key;
        let keys = self.keys(Key::Client)?;
        let builder = MicrosoftAzureBuilder::from_env();
        let builder = builder.with_url(self.url).with_retry(self.retry());
        let builder = keys.into_iter().fold(builder, |it, (key, value)| it.with_config(key, value));
        let sources = [
            Key::AccessKey,
            Key::SasKey,
            Key::Token,
            Key::ClientSecret,
            Key::FederatedTokenFile,
            Key::CredentialType,
        ];
        let is_given = sources.iter().any(|key| builder.get_config_value(key).is_some())
            || [Key::SkipSignature, Key::UseEmulator, Key::UseAzureCli]
                .iter()
                .any(|key| is_set(builder.get_config_value(key)));
        let store = builder.build().map_err(|e| self.not_built(&e))?;
        if !is_given {
            let help = "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or the options of these \
                        names), or the option skip_signature=true for a container that is public";
            self.ask(store.credentials().get_credential(), help)?;
        }
        Ok(Arc::new(store))
    }

    fn directory(&self, url: &Url) -> Result<Bucket> {
        if let Some((key, _)) = self.options.others.0.first() {
            return Err(Error::InvalidArgument(format!(
                "{key} is no option of a directory, and none of the tier's: {}",
                crate::OPTIONS.join(", ")
            )));
        }
        let path = url.to_file_path().map_err(|()| {
            Error::InvalidArgument(format!(
                "{} is no directory here: use file:///directory",
                self.location
            ))
        })?;
        let opened = Directory::open(&path);
        let directory = opened.map_err(|source| Error::Directory { path, source })?;
        Bucket::of_directory(directory, self.location, self.options.request_timeout)
    }

    /// Asks the machine for credentials where none are set: that is where they must come from.
    fn ask<T>(
        &self,
        credentials: impl Future<Output = object_store::Result<T>> + Send,
        help: &str,
    ) -> Result<()>
    where
        T: Send,
    {
        let failed = |e: std::io::Error| self.failed(format!("can't start a thread: {e}"));
        let runtime = runtime().map_err(failed)?;
        let asked = runtime
            .block_on(async { tokio::time::timeout(CREDENTIALS_TIMEOUT, credentials).await });
        runtime.shutdown_timeout(Duration::from_millis(100));
        match asked {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) | Err(_) => {
                Err(self
                    .failed(format!("no credentials are set, and this machine has none: {help}")))
            }
        }
    }
}

fn is_set(value: Option<String>) -> bool {
    value.is_some_and(|it| !matches!(it.as_str(), "false" | "0" | ""))
}
