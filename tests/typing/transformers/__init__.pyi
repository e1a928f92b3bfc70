"""Where pyright finds what this project takes from the top of transformers.

Its own ``__init__`` has pyright read every one of its models, which is most of the time of `make check`. The types are
the library's; only the way to them is shorter. A name that is missing here is an error at its import: add it.
"""

from transformers import cache_utils as cache_utils
from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.configuration_utils import PretrainedConfig as PretrainedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig as ContinuousBatchingConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList as LogitsProcessorList
from transformers.generation.logits_process import MinPLogitsWarper as MinPLogitsWarper
from transformers.generation.logits_process import NoBadWordsLogitsProcessor as NoBadWordsLogitsProcessor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor as RepetitionPenaltyLogitsProcessor
from transformers.generation.logits_process import SequenceBiasLogitsProcessor as SequenceBiasLogitsProcessor
from transformers.generation.logits_process import TemperatureLogitsWarper as TemperatureLogitsWarper
from transformers.generation.logits_process import TopKLogitsWarper as TopKLogitsWarper
from transformers.generation.logits_process import TopPLogitsWarper as TopPLogitsWarper
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING as CONFIG_MAPPING
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import AutoModel as AutoModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import AutoModelForImageTextToText as AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    AutoModelForSequenceClassification as AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import AutoModelForTokenClassification as AutoModelForTokenClassification
from transformers.models.auto.processing_auto import AutoProcessor as AutoProcessor
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.bert.configuration_bert import BertConfig as BertConfig
from transformers.models.bert.modeling_bert import BertModel as BertModel
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config as DeepseekV3Config
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config as Gemma2Config
from transformers.models.gpt_neo.configuration_gpt_neo import GPTNeoConfig as GPTNeoConfig
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoForCausalLM as GPTNeoForCausalLM
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig as GptOssConfig
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel as LlamaModel
from transformers.models.llama4.configuration_llama4 import Llama4Config as Llama4Config
from transformers.models.llama4.modeling_llama4 import Llama4ForConditionalGeneration as Llama4ForConditionalGeneration
from transformers.models.mistral.configuration_mistral import MistralConfig as MistralConfig
from transformers.models.mixtral.configuration_mixtral import MixtralConfig as MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM as MixtralForCausalLM
from transformers.models.phi3.configuration_phi3 import Phi3Config as Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3ForCausalLM as Phi3ForCausalLM
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as Qwen2Config
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast

__version__: str
